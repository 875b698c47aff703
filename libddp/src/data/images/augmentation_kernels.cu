// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "data/images/augmentation_kernels.hpp"

namespace ddp::detail {
namespace {

constexpr int kThreads = 192;  // two words of 16 bytes each cover a 32 px image's 3072 values

__device__ void store(float* out, float value) {
  *out = value;
}
__device__ void store(__nv_bfloat16* out, float value) {
  *out = __float2bfloat16_rn(value);
}
__device__ void store(__half* out, float value) {
  *out = __float2half_rn(value);
}

// 16 bytes of values.
template <typename Out>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(Out);
  Out value[kSize];
};

// Column, row and channel of output value v, and of the next value.
template <bool kChannelsLast>
struct Place {
  int x, y, c;
  __device__ Place(int v, int side) {
    if (kChannelsLast) {
      c = v % 3;
      x = v / 3 % side;
      y = v / 3 / side;
    } else {
      x = v % side;
      y = v / side % side;
      c = v / side / side;
    }
  }
  __device__ void advance(int side) {
    if (kChannelsLast) {
      if (++c < 3) {
        return;
      }
      c = 0;
    }
    if (++x < side) {
      return;
    }
    x = 0;
    if (++y < side) {
      return;
    }
    y = 0;
    ++c;
  }
};

__device__ void load_image(const uint8_t* from, int num_bytes, uint8_t* to) {
  if (num_bytes % 16 == 0) {  // then every image begins at a multiple of 16
    for (int i = threadIdx.x; i < num_bytes / 16; i += blockDim.x) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
  } else {
    for (int i = threadIdx.x; i < num_bytes; i += blockDim.x) {
      to[i] = from[i];
    }
  }
}

__device__ float value_at(const uint8_t* image, const float* table,
                          const SmallImageTransform& transform, const PadCrop& crop, int x, int y,
                          int c) {
  const int byte = small_image_byte(image, transform, crop, x, y, c);
  return byte < 0 ? 0.0f : table[c * 256 + byte];
}

// One block per image.
template <typename Out, bool kChannelsLast>
__global__ void __launch_bounds__(kThreads)
    make_batch(ResidentSet set, SmallImageTransform transform, Out* data, int64_t* target) {
  extern __shared__ __align__(16) uint8_t image[];
  __shared__ PadCrop shared_crop;
  __shared__ float table[3 * 256];
  for (int i = threadIdx.x; i < 3 * 256; i += kThreads) {  // overlaps the dependent loads
    table[i] = set.table[i];
  }
  const BatchPlace place = set.device_place != nullptr ? *set.device_place : set.place;
  const int64_t index = set.order[place.offset + blockIdx.x];
  const int side = transform.side;
  const int num_bytes = side * side * 3, num_values = side * side * transform.channels;
  load_image(set.pixels + index * num_bytes, num_bytes, image);
  if (threadIdx.x == 0) {
    shared_crop = draw_small_image(transform, static_cast<uint64_t>(place.epoch),
                                   static_cast<uint64_t>(index));
    target[blockIdx.x] = set.labels[index];
  }
  __syncthreads();
  const PadCrop crop = shared_crop;
  Out* out = data + static_cast<int64_t>(blockIdx.x) * num_values;
  constexpr int kPack = Pack<Out>::kSize;
  if (num_values % kPack == 0) {
    for (int v = threadIdx.x * kPack; v < num_values; v += kThreads * kPack) {
      Pack<Out> pack;
      Place<kChannelsLast> at(v, side);
      for (int i = 0; i < kPack; ++i, at.advance(side)) {
        store(&pack.value[i], value_at(image, table, transform, crop, at.x, at.y, at.c));
      }
      *reinterpret_cast<Pack<Out>*>(out + v) = pack;
    }
  } else {
    for (int v = threadIdx.x; v < num_values; v += kThreads) {
      const Place<kChannelsLast> at(v, side);
      store(out + v, value_at(image, table, transform, crop, at.x, at.y, at.c));
    }
  }
}

template <typename Out>
void launch_as(const ResidentSet& set, const SmallImageTransform& transform, int64_t num_samples,
               bool channels_last, void* data, int64_t* target, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(num_samples);
  const auto shared = static_cast<size_t>(transform.side * transform.side * 3);
  auto* out = static_cast<Out*>(data);
  if (channels_last && transform.channels > 1) {  // one channel has one order
    make_batch<Out, true><<<grid, kThreads, shared, stream>>>(set, transform, out, target);
  } else {
    make_batch<Out, false><<<grid, kThreads, shared, stream>>>(set, transform, out, target);
  }
}

}  // namespace

cudaError_t launch_resident_batch(const ResidentSet& set, const SmallImageTransform& transform,
                                  int64_t num_samples, KernelDtype dtype, bool channels_last,
                                  void* data, int64_t* target, cudaStream_t stream) {
  switch (dtype) {
    case KernelDtype::Fp32:
      launch_as<float>(set, transform, num_samples, channels_last, data, target, stream);
      break;
    case KernelDtype::Bf16:
      launch_as<__nv_bfloat16>(set, transform, num_samples, channels_last, data, target, stream);
      break;
    case KernelDtype::Fp16:
      launch_as<__half>(set, transform, num_samples, channels_last, data, target, stream);
      break;
  }
  return cudaGetLastError();
}

}  // namespace ddp::detail
