// SPDX-License-Identifier: Apache-2.0
#include "ops/kernel_types.cuh"
#include "ops/vision/tap_kernels.hpp"

namespace ddp::ops::detail {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;
constexpr int kTaps = 9;

template <typename T>
__device__ T* tap_address(const TapFilter& filter, int k, int c, int tap) {
  return static_cast<T*>(filter.data) + k * filter.strides[0] + c * filter.strides[1] +
         tap / 3 * filter.strides[2] + tap % 3 * filter.strides[3];
}

/// A thread writes eight channels of one block.
template <typename T, typename Dense>
__global__ void spread(TapFilter filter, TapBlocks blocks, Dense* dense) {
  const int vectors = filter.channels / kVector;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= int64_t{blocks.outs} * filter.filters * blocks.ins * vectors) {
    return;
  }
  const int vector = static_cast<int>(index % vectors);
  const int64_t block_row = index / vectors;
  const int in = static_cast<int>(block_row % blocks.ins);
  const int k = static_cast<int>(block_row / blocks.ins % filter.filters);
  const int out = static_cast<int>(block_row / blocks.ins / filter.filters);
  const int tap = blocks.taps[out * blocks.ins + in];
  float values[kVector] = {};
  if (tap >= 0) {
    load8(tap_address<T>(filter, k, vector * kVector, tap), filter.strides[1], values);
  }
  store8(dense + index * kVector, 1, values);
}

/// A thread computes eight channels of one tap.
template <typename T, typename Dense>
__global__ void fold(TapFilter filter, TapBlocks blocks, const Dense* dense, bool accumulates) {
  const int vectors = filter.channels / kVector;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= int64_t{filter.filters} * kTaps * vectors) {
    return;
  }
  const int c = static_cast<int>(index % vectors) * kVector;
  const int tap = static_cast<int>(index / vectors % kTaps);
  const int k = static_cast<int>(index / vectors / kTaps);
  float sums[kVector] = {};
  for (int out = 0; out < blocks.outs; ++out) {
    for (int in = 0; in < blocks.ins; ++in) {
      if (blocks.taps[out * blocks.ins + in] == tap) {
        const int64_t row = (int64_t{out} * filter.filters + k) * blocks.ins + in;
        float values[kVector];
        load8(dense + row * filter.channels + c, 1, values);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          sums[j] += values[j];
        }
      }
    }
  }
  T* to = tap_address<T>(filter, k, c, tap);
  if (accumulates) {
    float before[kVector];
    load8(to, filter.strides[1], before);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      sums[j] += before[j];
    }
  }
  store8(to, filter.strides[1], sums);
}

}  // namespace

cudaError_t launch_spread_taps(const TapFilter& filter, const TapBlocks& blocks, void* dense,
                               Element dense_element, cudaStream_t stream) {
  return with_float_type(filter.element, [&](auto from) {
    return with_compute_type(dense_element, [&](auto to) {
      using T = typename decltype(from)::type;
      using Dense = typename decltype(to)::type;
      const int64_t threads =
          int64_t{blocks.outs} * filter.filters * blocks.ins * (filter.channels / kVector);
      spread<T, Dense><<<num_blocks(threads, kThreads), kThreads, 0, stream>>>(
          filter, blocks, static_cast<Dense*>(dense));
      return cudaGetLastError();
    });
  });
}

cudaError_t launch_fold_taps(const TapFilter& filter, const TapBlocks& blocks, const void* dense,
                             Element dense_element, bool accumulates, cudaStream_t stream) {
  return with_float_type(filter.element, [&](auto to) {
    return with_float_type(dense_element, [&](auto from) {
      using T = typename decltype(to)::type;
      using Dense = typename decltype(from)::type;
      const int64_t threads = int64_t{filter.filters} * kTaps * (filter.channels / kVector);
      fold<T, Dense><<<num_blocks(threads, kThreads), kThreads, 0, stream>>>(
          filter, blocks, static_cast<const Dense*>(dense), accumulates);
      return cudaGetLastError();
    });
  });
}

}  // namespace ddp::ops::detail
