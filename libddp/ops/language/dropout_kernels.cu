// SPDX-License-Identifier: Apache-2.0
#include "ops/language/dropout_kernels.hpp"

#include "ops/kernel_types.cuh"
#include "ops/language/column_sums.cuh"
#include "ops/language/dropout_draws.cuh"

namespace ddp::ops::detail {
namespace {

/// True in one thread of the grid.
__device__ bool is_first_thread() {
  return blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0 && threadIdx.y == 0;
}

template <typename T, typename B>
__global__ void add_branch(BranchRows shape, int64_t part_rows, const T* branch, const B* bias,
                           const T* residual, DropoutDraws draws, T* out) {
  const auto dropout = start_draws(draws, is_first_thread());
  const int64_t column = column_of_thread();
  if (column >= shape.columns) {
    return;
  }
  float shift[kColumnVector] = {};
  if (bias != nullptr) {
    load8(bias + column, 1, shift);
  }
  const int64_t first = blockIdx.y * part_rows;
  const int64_t end = min(first + part_rows, shape.rows);
#pragma unroll 2
  for (int64_t row = first + threadIdx.y; row < end; row += kColumnRows) {
    const int64_t i = row * shape.columns + column;
    float values[kColumnVector];
    load8(branch + i, 1, values);
#pragma unroll
    for (int j = 0; j < kColumnVector; ++j) {
      values[j] += shift[j];
    }
    if (dropout.threshold > 0) {
      drop8(dropout, i / kColumnVector, values);
    }
    if (residual != nullptr) {
      float before[kColumnVector];
      load8(residual + i, 1, before);
#pragma unroll
      for (int j = 0; j < kColumnVector; ++j) {
        values[j] += before[j];
      }
    }
    store8(out + i, 1, values);
  }
}

template <typename T>
__global__ void add_branch_backward(BranchRows shape, int64_t part_rows, const T* grad,
                                    DropoutDraws draws, T* out, float* parts) {
  const auto dropout = start_draws(draws, false);
  const int64_t column = column_of_thread();
  const int64_t first = blockIdx.y * part_rows;
  const int64_t end = min(first + part_rows, shape.rows);
  float own[kColumnVector] = {};
  if (column < shape.columns) {
#pragma unroll 2
    for (int64_t row = first + threadIdx.y; row < end; row += kColumnRows) {
      const int64_t i = row * shape.columns + column;
      float values[kColumnVector];
      load8(grad + i, 1, values);
      if (dropout.threshold > 0) {
        drop8(dropout, i / kColumnVector, values);
      }
      store8(out + i, 1, values);
#pragma unroll
      for (int j = 0; j < kColumnVector; ++j) {
        own[j] += values[j];
      }
    }
  }
  if (parts != nullptr) {
    write_column_part(own, shape.columns, parts);
  }
}

}  // namespace

cudaError_t launch_add_branch(const BranchRows& shape, const void* branch, const void* bias,
                              const void* residual, const DropoutDraws& draws, void* out,
                              cudaStream_t stream) {
  const auto launch = [&](auto tag, auto bias_tag) {
    using T = typename decltype(tag)::type;
    using B = typename decltype(bias_tag)::type;
    add_branch<<<column_grid(shape.rows, shape.columns), dim3(kColumnLanes, kColumnRows), 0,
                 stream>>>(shape, rows_of_column_part(shape.rows, shape.columns),
                           static_cast<const T*>(branch), static_cast<const B*>(bias),
                           static_cast<const T*>(residual), draws, static_cast<T*>(out));
    return cudaGetLastError();
  };
  return with_compute_type(shape.element, [&](auto tag) {
    return shape.bias == Element::Float32 ? launch(tag, TypeTag<float>{}) : launch(tag, tag);
  });
}

cudaError_t launch_add_branch_backward(const BranchRows& shape, const void* grad,
                                       const DropoutDraws& draws, void* out, float* parts,
                                       cudaStream_t stream) {
  return with_compute_type(shape.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    add_branch_backward<<<column_grid(shape.rows, shape.columns), dim3(kColumnLanes, kColumnRows),
                          0, stream>>>(shape, rows_of_column_part(shape.rows, shape.columns),
                                       static_cast<const T*>(grad), draws, static_cast<T*>(out),
                                       parts);
    return cudaGetLastError();
  });
}

}  // namespace ddp::ops::detail
