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

template <typename Pair>
__device__ __forceinline__ float4 widen4(uint2 bits) {
  const float2 low = widen(*reinterpret_cast<const Pair*>(&bits.x));
  const float2 high = widen(*reinterpret_cast<const Pair*>(&bits.y));
  return {low.x, low.y, high.x, high.y};
}

template <typename Pair>
__device__ __forceinline__ uint2 narrow4(const float4& value) {
  uint2 bits;
  narrow(value.x, value.y, *reinterpret_cast<Pair*>(&bits.x));
  narrow(value.z, value.w, *reinterpret_cast<Pair*>(&bits.y));
  return bits;
}

// A block has one dtype, so the branches cost nothing compared with the memory access.
__device__ __forceinline__ float4 widen4(FlatDtype dtype, uint2 bits) {
  return dtype == FlatDtype::BFloat16 ? widen4<__nv_bfloat162>(bits) : widen4<__half2>(bits);
}

__device__ __forceinline__ uint2 narrow4(FlatDtype dtype, const float4& value) {
  return dtype == FlatDtype::BFloat16 ? narrow4<__nv_bfloat162>(value) : narrow4<__half2>(value);
}

// The bits of four halves.
__device__ __forceinline__ uint2 read_half4(const void* data, bool whole, int64_t i,
                                            int64_t numel) {
  const uint16_t* halves = static_cast<const uint16_t*>(data) + i;
  if (whole) {
    return *reinterpret_cast<const uint2*>(halves);
  }
  const auto half = [&](int k) { return i + k < numel ? uint32_t{halves[k]} : 0U; };
  return {half(0) | half(1) << 16, half(2) | half(3) << 16};
}

__device__ __forceinline__ void write_half4(void* data, bool whole, int64_t i, int64_t numel,
                                            uint2 bits) {
  uint16_t* halves = static_cast<uint16_t*>(data) + i;
  if (whole) {
    *reinterpret_cast<uint2*>(halves) = bits;
    return;
  }
  for (int k = 0; k < 4 && i + k < numel; ++k) {
    halves[k] = static_cast<uint16_t>((k < 2 ? bits.x : bits.y) >> (k % 2 * 16));
  }
}

__device__ __forceinline__ float4 read_gradient(const void* data, FlatDtype dtype, bool whole,
                                                int64_t i, int64_t numel) {
  return dtype == FlatDtype::Float32 ? read_float4(static_cast<const float*>(data), whole, i, numel)
                                     : widen4(dtype, read_half4(data, whole, i, numel));
}

__device__ __forceinline__ void write_leaf(const FlatSegment& segment, bool whole, int64_t i,
                                           const float4& value) {
  write_half4(segment.leaf, whole, i, segment.numel, narrow4(segment.leaf_dtype, value));
}

// The rounding is write_leaf's, or masters would lose their low bits in every step.
__device__ __forceinline__ float4 master_of(FlatDtype dtype, const float4& master, uint2 leaf) {
  const float4 given = widen4(dtype, leaf);
  const float4 rounded = widen4(dtype, narrow4(dtype, master));
  return {flat_master(master.x, rounded.x, given.x), flat_master(master.y, rounded.y, given.y),
          flat_master(master.z, rounded.z, given.z), flat_master(master.w, rounded.w, given.w)};
}

}  // namespace ddp::detail
