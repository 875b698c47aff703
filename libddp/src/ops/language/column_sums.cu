// SPDX-License-Identifier: Apache-2.0
#include "ops/language/column_sums.hpp"

#include <algorithm>

#include "ops/kernel_types.cuh"

namespace ddp::ops::detail {
namespace {

constexpr int kLanes = 32;
constexpr int kRowThreads = 8;
constexpr int kVector = 8;
constexpr int64_t kColumnsPerBlock = int64_t{kLanes} * kVector;
// About four blocks for each multiprocessor of the largest GPUs.
constexpr int64_t kBlocks = 528;
constexpr int64_t kMinRows = 32;  // of a part

/// A block sums the rows of one part for 256 columns. A warp reads 512 adjacent bytes of a row.
template <typename T>
__global__ void part_sums(const T* in, int64_t rows, int64_t columns, int64_t part_rows,
                          float* parts) {
  __shared__ float sums[kRowThreads][kLanes][kVector + 1];
  const int64_t column = blockIdx.x * kColumnsPerBlock + threadIdx.x * kVector;
  const int64_t first = blockIdx.y * part_rows;
  const int64_t end = min(first + part_rows, rows);
  float own[kVector] = {};
  if (column < columns) {
#pragma unroll 4
    for (int64_t row = first + threadIdx.y; row < end; row += kRowThreads) {
      float values[kVector];
      load8(in + row * columns + column, 1, values);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        own[j] += values[j];
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    sums[threadIdx.y][threadIdx.x][j] = own[j];
  }
  __syncthreads();
  // Each thread finishes one of the block's 256 columns.
  const int lane = static_cast<int>(threadIdx.y) * (kLanes / kRowThreads) +
                   static_cast<int>(threadIdx.x) / kVector;
  const int j = static_cast<int>(threadIdx.x) % kVector;
  const int64_t finished = blockIdx.x * kColumnsPerBlock + lane * kVector + j;
  if (finished < columns) {
    float sum = 0;
    for (int r = 0; r < kRowThreads; ++r) {
      sum += sums[r][lane][j];
    }
    parts[blockIdx.y * columns + finished] = sum;
  }
}

template <typename Out>
__global__ void add_parts(const float* parts, int64_t num_parts, int64_t columns, Out* out,
                          float beta) {
  __shared__ float sums[kRowThreads][kLanes];
  const int64_t column = int64_t{blockIdx.x} * kLanes + threadIdx.x;
  float own = 0;
  if (column < columns) {
#pragma unroll 4
    for (int64_t part = threadIdx.y; part < num_parts; part += kRowThreads) {
      own += parts[part * columns + column];
    }
  }
  sums[threadIdx.y][threadIdx.x] = own;
  __syncthreads();
  if (threadIdx.y == 0 && column < columns) {
    for (int r = 1; r < kRowThreads; ++r) {
      own += sums[r][threadIdx.x];
    }
    const float before = beta == 0.0F ? 0.0F : to_float(out[column]);
    out[column] = from_float<Out>(before + own);
  }
}

int64_t rows_of_part(int64_t rows, int64_t columns) {
  const int64_t column_blocks = (columns + kColumnsPerBlock - 1) / kColumnsPerBlock;
  const int64_t parts = std::max<int64_t>(1, kBlocks / column_blocks);
  return std::max(kMinRows, (rows + parts - 1) / parts);
}

}  // namespace

int num_column_parts(int64_t rows, int64_t columns) {
  const int64_t part_rows = rows_of_part(rows, columns);
  return static_cast<int>(std::max<int64_t>(1, (rows + part_rows - 1) / part_rows));
}

cudaError_t launch_add_parts(const float* in, int64_t parts, int64_t columns, const GradOut& out,
                             cudaStream_t stream) {
  return with_float_type(out.element, [&](auto tag) {
    using Out = typename decltype(tag)::type;
    add_parts<<<num_blocks(columns, kLanes), dim3(kLanes, kRowThreads), 0, stream>>>(
        in, parts, columns, static_cast<Out*>(out.data), out.beta);
    return cudaGetLastError();
  });
}

cudaError_t launch_column_sums(const void* in, Element element, int64_t rows, int64_t columns,
                               float* scratch, const GradOut& out, cudaStream_t stream) {
  const int parts = num_column_parts(rows, columns);
  const auto status = with_compute_type(element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const dim3 grid(num_blocks(columns, static_cast<int>(kColumnsPerBlock)),
                    static_cast<unsigned>(parts));
    part_sums<<<grid, dim3(kLanes, kRowThreads), 0, stream>>>(
        static_cast<const T*>(in), rows, columns, rows_of_part(rows, columns), scratch);
    return cudaGetLastError();
  });
  return status != cudaSuccess ? status : launch_add_parts(scratch, parts, columns, out, stream);
}

}  // namespace ddp::ops::detail
