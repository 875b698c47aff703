// SPDX-License-Identifier: Apache-2.0
// Loads and stores of four elements at once, in any dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "optim/flat/math.hpp"

namespace ddp::detail {

// Four elements are loaded or stored at once if all are inside [0, numel) and aligned to 16 bytes
// (8 for halves).
__device__ __forceinline__ float4 read_float4(const float* data, bool whole, int64_t i,
                                              int64_t numel) {
  if (whole) {
    return *reinterpret_cast<const float4*>(data + i);
  }
  return {data[i], i + 1 < numel ? data[i + 1] : 0.0F, i + 2 < numel ? data[i + 2] : 0.0F,
          i + 3 < numel ? data[i + 3] : 0.0F};
}

__device__ __forceinline__ void write_float4(float* data, bool whole, int64_t i, int64_t numel,
                                             const float4& value) {
  if (whole) {
    *reinterpret_cast<float4*>(data + i) = value;
    return;
  }
  const float* values = &value.x;
  for (int k = 0; k < 4 && i + k < numel; ++k) {
    data[i + k] = values[k];
  }
}

__device__ __forceinline__ float2 widen(__nv_bfloat162 pair) {
  return __bfloat1622float2(pair);
}
__device__ __forceinline__ float2 widen(__half2 pair) {
  return __half22float2(pair);
}
__device__ __forceinline__ void narrow(float a, float b, __nv_bfloat162& pair) {
  pair = __floats2bfloat162_rn(a, b);
}
__device__ __forceinline__ void narrow(float a, float b, __half2& pair) {
  pair = __floats2half2_rn(a, b);
}
__device__ __forceinline__ void narrow(float a, __nv_bfloat16& value) {
  value = __float2bfloat16_rn(a);
}
__device__ __forceinline__ void narrow(float a, __half& value) {
  value = __float2half_rn(a);
}

template <typename Half, typename Pair>
__device__ __forceinline__ float4 read_half4(const void* data, bool whole, int64_t i,
                                             int64_t numel) {
  const Half* halves = static_cast<const Half*>(data) + i;
  if (whole) {
    const uint2 bits = *reinterpret_cast<const uint2*>(halves);
    const float2 low = widen(*reinterpret_cast<const Pair*>(&bits.x));
    const float2 high = widen(*reinterpret_cast<const Pair*>(&bits.y));
    return {low.x, low.y, high.x, high.y};
  }
  return {static_cast<float>(halves[0]), i + 1 < numel ? static_cast<float>(halves[1]) : 0.0F,
          i + 2 < numel ? static_cast<float>(halves[2]) : 0.0F,
          i + 3 < numel ? static_cast<float>(halves[3]) : 0.0F};
}

template <typename Half, typename Pair>
__device__ __forceinline__ void write_half4(void* data, bool whole, int64_t i, int64_t numel,
                                            const float4& value) {
  Half* halves = static_cast<Half*>(data) + i;
  if (whole) {
    uint2 bits;
    narrow(value.x, value.y, *reinterpret_cast<Pair*>(&bits.x));
    narrow(value.z, value.w, *reinterpret_cast<Pair*>(&bits.y));
    *reinterpret_cast<uint2*>(halves) = bits;
    return;
  }
  const float* values = &value.x;
  for (int k = 0; k < 4 && i + k < numel; ++k) {
    narrow(values[k], halves[k]);
  }
}

// A block has one dtype, so the branches cost nothing compared with the memory access.
__device__ __forceinline__ float4 read_gradient(const void* data, FlatDtype dtype, bool whole,
                                                int64_t i, int64_t numel) {
  if (dtype == FlatDtype::BFloat16) {
    return read_half4<__nv_bfloat16, __nv_bfloat162>(data, whole, i, numel);
  }
  if (dtype == FlatDtype::Float16) {
    return read_half4<__half, __half2>(data, whole, i, numel);
  }
  return read_float4(static_cast<const float*>(data), whole, i, numel);
}

__device__ __forceinline__ void write_leaf(const FlatSegment& segment, bool whole, int64_t i,
                                           const float4& value) {
  if (segment.leaf_dtype == FlatDtype::BFloat16) {
    write_half4<__nv_bfloat16, __nv_bfloat162>(segment.leaf, whole, i, segment.numel, value);
  } else {
    write_half4<__half, __half2>(segment.leaf, whole, i, segment.numel, value);
  }
}

}  // namespace ddp::detail
