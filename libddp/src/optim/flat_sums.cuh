// SPDX-License-Identifier: Apache-2.0
// Sums over a block in a fixed order.
#pragma once

#include "optim/flat_math.hpp"

namespace ddp::detail {

/// The sum over the block's kFlatThreads threads, in thread 0. May be called repeatedly.
template <typename T>
__device__ __forceinline__ T sum_over_block(T value) {
  __shared__ T sums[kFlatThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_down_sync(0xffffffffU, value, distance);
  }
  __syncthreads();  // wait until an earlier call's sums are read
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = value;
  }
  __syncthreads();
  T sum = 0;
#pragma unroll
  for (int warp = 0; warp < kFlatThreads / 32; ++warp) {
    sum += sums[warp];
  }
  return sum;
}

}  // namespace ddp::detail
