// SPDX-License-Identifier: Apache-2.0
#include "ops/layout/row_copy_kernels.hpp"

#include "ops/kernel_types.cuh"

namespace ddp::ops::detail {
namespace {

constexpr int kThreads = 256;
constexpr int kVectorsPerThread = 4;  // in flight at once

/// Division of numbers below 2^31 by a multiplication (Granlund and Montgomery, 1994, section 4).
struct Divisor {
  uint32_t value, factor, shift;
};

Divisor make_divisor(uint32_t value) {
  uint32_t shift = 0;
  while ((uint64_t{1} << shift) < value) {
    ++shift;
  }
  const uint64_t excess = (uint64_t{1} << shift) - value;
  return {value, static_cast<uint32_t>((excess << 32) / value + 1), shift};
}

__device__ __forceinline__ uint32_t quotient(uint32_t number, const Divisor& by) {
  return (__umulhi(number, by.factor) + number) >> by.shift;
}

struct Plan {
  RowCopy copy;
  Divisor sizes[kMaxRowDims];
};

template <int kDims, typename Vector>
__global__ void __launch_bounds__(kThreads)
    copy_rows(const __grid_constant__ Plan plan, Vector* __restrict__ to,
              const Vector* __restrict__ from) {
  const uint32_t first = blockIdx.x * (kThreads * kVectorsPerThread) + threadIdx.x;
  Vector vectors[kVectorsPerThread];
  int64_t places[kVectorsPerThread];
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    uint32_t rest = first + i * kThreads;
    if (rest >= plan.copy.vectors) {
      break;
    }
    int64_t source = 0;
    places[i] = 0;
#pragma unroll
    for (int dim = 0; dim < kDims; ++dim) {
      uint32_t index = rest;
      if (dim + 1 < kDims) {
        rest = quotient(index, plan.sizes[dim]);
        index -= rest * plan.sizes[dim].value;
      }
      places[i] += index * plan.copy.to_strides[dim];
      source += index * plan.copy.from_strides[dim];
    }
    vectors[i] = from[source];
  }
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    if (first + i * kThreads < plan.copy.vectors) {
      to[places[i]] = vectors[i];
    }
  }
}

template <int kDims, typename Vector>
void launch(const Plan& plan, void* to, const void* from, cudaStream_t stream) {
  copy_rows<kDims>
      <<<num_blocks(plan.copy.vectors, kThreads * kVectorsPerThread), kThreads, 0, stream>>>(
          plan, static_cast<Vector*>(to), static_cast<const Vector*>(from));
}

template <typename Vector>
cudaError_t launch_of(const Plan& plan, void* to, const void* from, cudaStream_t stream) {
  switch (plan.copy.dims) {
    case 2:
      launch<2, Vector>(plan, to, from, stream);
      break;
    case 3:
      launch<3, Vector>(plan, to, from, stream);
      break;
    case 4:
      launch<4, Vector>(plan, to, from, stream);
      break;
    case 5:
      launch<5, Vector>(plan, to, from, stream);
      break;
    case 6:
      launch<6, Vector>(plan, to, from, stream);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_row_copy(const RowCopy& copy, void* to, const void* from, cudaStream_t stream) {
  Plan plan = {copy, {}};
  for (int dim = 0; dim < copy.dims; ++dim) {
    plan.sizes[dim] = make_divisor(copy.sizes[dim]);
  }
  switch (copy.vector_bytes) {
    case 4:
      return launch_of<uint32_t>(plan, to, from, stream);
    case 8:
      return launch_of<uint2>(plan, to, from, stream);
    case 16:
      return launch_of<uint4>(plan, to, from, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace ddp::ops::detail
