// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ops/kernel_types.hpp"

namespace ddp::ops::detail {

__device__ __forceinline__ float to_float(float value) {
  return value;
}
__device__ __forceinline__ float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
__device__ __forceinline__ float to_float(__half value) {
  return __half2float(value);
}
__device__ __forceinline__ float to_float(uint8_t value) {
  return static_cast<float>(value);
}

template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16(value);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half(value);
}

template <typename T>
struct TypeTag {
  using type = T;
};

/// Calls `call` with the tag of bf16 or fp16, the dtypes that the ops compute in.
template <typename Call>
cudaError_t with_compute_type(Element element, Call&& call) {
  switch (element) {
    case Element::Bfloat16:
      return call(TypeTag<__nv_bfloat16>{});
    case Element::Float16:
      return call(TypeTag<__half>{});
    default:
      return cudaErrorInvalidValue;
  }
}

/// Same, including float.
template <typename Call>
cudaError_t with_float_type(Element element, Call&& call) {
  return element == Element::Float32 ? call(TypeTag<float>{})
                                     : with_compute_type(element, static_cast<Call&&>(call));
}

/// Same, including uint8, for images.
template <typename Call>
cudaError_t with_image_type(Element element, Call&& call) {
  return element == Element::UInt8 ? call(TypeTag<uint8_t>{})
                                   : with_float_type(element, static_cast<Call&&>(call));
}

/// The number of blocks of `block_threads` that `threads` threads need.
constexpr unsigned num_blocks(int64_t threads, int block_threads) {
  return static_cast<unsigned>((threads + block_threads - 1) / block_threads);
}

/// Eight adjacent values of 2 or 4 bytes.
template <typename T>
union Vector8 {
  uint4 bits[sizeof(T) / 2];
  T values[8];
};

/// Reads eight adjacent values 16 bytes at a time, whose address must be a multiple of 16.
template <typename T>
__device__ __forceinline__ void load_vector8(const T* from, float (&values)[8]) {
  Vector8<T> vector;
#pragma unroll
  for (unsigned i = 0; i < sizeof(T) / 2; ++i) {
    vector.bits[i] = reinterpret_cast<const uint4*>(from)[i];
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    values[j] = to_float(vector.values[j]);
  }
}

template <typename T>
__device__ __forceinline__ void store_vector8(T* to, const float (&values)[8]) {
  Vector8<T> vector;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    vector.values[j] = from_float<T>(values[j]);
  }
#pragma unroll
  for (unsigned i = 0; i < sizeof(T) / 2; ++i) {
    reinterpret_cast<uint4*>(to)[i] = vector.bits[i];
  }
}

/// Eight values, `stride` elements apart. Adjacent values of a 2-byte type are one vector.
template <typename T>
__device__ __forceinline__ void load8(const T* from, int64_t stride, float (&values)[8]) {
  if constexpr (sizeof(T) == 2) {
    if (stride == 1) {
      load_vector8(from, values);
      return;
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    values[j] = to_float(from[j * stride]);
  }
}

template <typename T>
__device__ __forceinline__ void store8(T* to, int64_t stride, const float (&values)[8]) {
  if constexpr (sizeof(T) == 2) {
    if (stride == 1) {
      store_vector8(to, values);
      return;
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    to[j * stride] = from_float<T>(values[j]);
  }
}

}  // namespace ddp::ops::detail
