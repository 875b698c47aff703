// SPDX-License-Identifier: Apache-2.0
#include "ops/part_sums.hpp"

#include "ops/kernel_types.cuh"

namespace ddp::ops::detail {
namespace {

constexpr int kThreads = 256;

/// kSlots threads share four adjacent numbers. Each adds every kSlots-th part; the first thread
/// adds their sums.
template <typename Out, int kSlots>
__global__ void __launch_bounds__(kThreads)
    sum_parts(const float4* partial, int splits, int vectors, int size, TapFilter filter,
              bool accumulates) {
  constexpr int kLanes = kThreads / kSlots;
  __shared__ float4 sums[kSlots][kLanes];
  const int slot = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int vector = static_cast<int>(blockIdx.x) * kLanes + lane;
  float4 sum = make_float4(0, 0, 0, 0);
  const auto add = [&sum](const float4& part) {
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  };
  if (vector < vectors) {
#pragma unroll 8
    for (int split = slot; split < splits; split += kSlots) {
      add(partial[int64_t{split} * vectors + vector]);
    }
  }
  sums[slot][lane] = sum;
  __syncthreads();
  if (slot > 0 || vector >= vectors) {
    return;
  }
#pragma unroll
  for (int i = 1; i < kSlots; ++i) {
    add(sums[i][lane]);
  }
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const unsigned index = vector * 4 + j, square = size * size;
    const unsigned channel = index % filter.channels, tap = index / filter.channels;
    Out& at = static_cast<Out*>(
        filter.data)[tap / square * filter.strides[0] + channel * filter.strides[1] +
                     tap % square / size * filter.strides[2] + tap % size * filter.strides[3]];
    at = from_float<Out>(accumulates ? to_float(at) + values[j] : values[j]);
  }
}

}  // namespace

cudaError_t launch_sum_parts(const float* partial, int splits, int size, const TapFilter& filter,
                             bool accumulates, cudaStream_t stream) {
  // With few numbers, many threads share each number to fill the GPU.
  constexpr int kFewNumbers = 4096;
  const int vectors = filter.filters * size * size * filter.channels / 4;
  return with_float_type(filter.element, [&](auto tag) {
    using Out = typename decltype(tag)::type;
    const auto launch = [&](auto kernel, int slots) {
      const int lanes = kThreads / slots;
      kernel<<<(vectors + lanes - 1) / lanes, kThreads, 0, stream>>>(
          reinterpret_cast<const float4*>(partial), splits, vectors, size, filter, accumulates);
      return cudaGetLastError();
    };
    return vectors < kFewNumbers ? launch(sum_parts<Out, 16>, 16) : launch(sum_parts<Out, 4>, 4);
  });
}

}  // namespace ddp::ops::detail
