// SPDX-License-Identifier: Apache-2.0
#include "ops/language/column_sums.hpp"

#include "ops/kernel_types.cuh"
#include "ops/language/column_sums.cuh"

namespace ddp::ops::detail {
namespace {

/// A block sums the rows of one part for 256 columns. A warp reads 512 adjacent bytes of a row.
template <typename T>
__global__ void part_sums(const T* in, int64_t rows, int64_t columns, int64_t part_rows,
                          float* parts) {
  const int64_t column = column_of_thread();
  const int64_t first = blockIdx.y * part_rows;
  const int64_t end = min(first + part_rows, rows);
  float own[kColumnVector] = {};
  if (column < columns) {
#pragma unroll 4
    for (int64_t row = first + threadIdx.y; row < end; row += kColumnRows) {
      float values[kColumnVector];
      load8(in + row * columns + column, 1, values);
#pragma unroll
      for (int j = 0; j < kColumnVector; ++j) {
        own[j] += values[j];
      }
    }
  }
  write_column_part(own, columns, parts);
}

template <typename Out>
__global__ void add_parts(const float* parts, int64_t num_parts, int64_t columns, Out* out,
                          float beta) {
  __shared__ float sums[kColumnRows][kColumnLanes];
  const int64_t column = int64_t{blockIdx.x} * kColumnLanes + threadIdx.x;
  float own = 0;
  if (column < columns) {
#pragma unroll 4
    for (int64_t part = threadIdx.y; part < num_parts; part += kColumnRows) {
      own += parts[part * columns + column];
    }
  }
  sums[threadIdx.y][threadIdx.x] = own;
  __syncthreads();
  if (threadIdx.y == 0 && column < columns) {
    for (int r = 1; r < kColumnRows; ++r) {
      own += sums[r][threadIdx.x];
    }
    const float before = beta == 0.0F ? 0.0F : to_float(out[column]);
    out[column] = from_float<Out>(before + own);
  }
}

constexpr int kWideVector = 4;

/// add_parts() where columns are many and parts few: a thread has kWideVector columns.
template <typename Out>
__global__ void add_wide_parts(const float* parts, int64_t num_parts, int64_t columns, Out* out,
                               float beta) {
  const int64_t column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kWideVector;
  if (column >= columns) {
    return;
  }
  float4 sum = {0, 0, 0, 0};
#pragma unroll 4
  for (int64_t part = 0; part < num_parts; ++part) {
    const float4 next = *reinterpret_cast<const float4*>(parts + part * columns + column);
    sum = {sum.x + next.x, sum.y + next.y, sum.z + next.z, sum.w + next.w};
  }
  const float sums[kWideVector] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int j = 0; j < kWideVector; ++j) {
    const float before = beta == 0.0F ? 0.0F : to_float(out[column + j]);
    out[column + j] = from_float<Out>(before + sums[j]);
  }
}

}  // namespace

int num_column_parts(int64_t rows, int64_t columns) {
  return static_cast<int>(column_grid(rows, columns).y);
}

cudaError_t launch_add_parts(const float* in, int64_t parts, int64_t columns, const GradOut& out,
                             cudaStream_t stream) {
  return with_float_type(out.element, [&](auto tag) {
    using Out = typename decltype(tag)::type;
    constexpr int64_t kManyColumns = 65536;
    constexpr int kThreads = 256;
    if (columns >= kManyColumns && columns % kWideVector == 0) {
      add_wide_parts<<<num_blocks(columns / kWideVector, kThreads), kThreads, 0, stream>>>(
          in, parts, columns, static_cast<Out*>(out.data), out.beta);
      return cudaGetLastError();
    }
    add_parts<<<num_blocks(columns, kColumnLanes), dim3(kColumnLanes, kColumnRows), 0, stream>>>(
        in, parts, columns, static_cast<Out*>(out.data), out.beta);
    return cudaGetLastError();
  });
}

cudaError_t launch_column_sums(const void* in, Element element, int64_t rows, int64_t columns,
                               float* scratch, const GradOut& out, cudaStream_t stream) {
  const auto status = with_float_type(element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    part_sums<<<column_grid(rows, columns), dim3(kColumnLanes, kColumnRows), 0, stream>>>(
        static_cast<const T*>(in), rows, columns, rows_of_column_part(rows, columns), scratch);
    return cudaGetLastError();
  });
  return status != cudaSuccess
             ? status
             : launch_add_parts(scratch, num_column_parts(rows, columns), columns, out, stream);
}

}  // namespace ddp::ops::detail
