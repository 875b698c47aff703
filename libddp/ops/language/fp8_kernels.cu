// SPDX-License-Identifier: Apache-2.0
// A block has a row and keeps it in registers between finding its largest magnitude and scaling.
#include "ops/language/fp8_kernels.hpp"

#include <cuda_fp8.h>

#include "ops/kernel_types.cuh"
#include "ops/language/gated_gradient.cuh"

namespace ddp::ops::detail {
namespace {

constexpr int kWarp = 32;
constexpr int kVector = 8;

/// a unless b is larger; NaN if either is.
__device__ float larger(float a, float b) {
  return a > b || isnan(a) ? a : b;
}

/// The largest of all threads' values, for all of them.
template <int kThreads>
__device__ float block_max(float own) {
  __shared__ float of_warps[kThreads / kWarp];
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    own = larger(own, __shfl_xor_sync(~0U, own, offset));
  }
  if (threadIdx.x % kWarp == 0) {
    of_warps[threadIdx.x / kWarp] = own;
  }
  __syncthreads();
  own = of_warps[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / kWarp; ++warp) {
    own = larger(own, of_warps[warp]);
  }
  return own;
}

__device__ __nv_bfloat162 as_pair(__nv_bfloat16 first, __nv_bfloat16 second) {
  return {first, second};
}
__device__ __half2 as_pair(__half first, __half second) {
  return {first, second};
}

/// The largest magnitudes of the even and of the odd elements so far. NaN wins.
template <typename T>
struct Magnitude {
  decltype(as_pair(T{}, T{})) pair = as_pair(from_float<T>(0.0F), from_float<T>(0.0F));

  __device__ __forceinline__ void add(const Vector8<T>& vector) {
#pragma unroll
    for (int j = 0; j < kVector; j += 2) {
      pair = __hmax2_nan(pair, __habs2(as_pair(vector.values[j], vector.values[j + 1])));
    }
  }
  __device__ __forceinline__ float get() const {
    return larger(to_float(pair.x), to_float(pair.y));
  }
};

__device__ float inverse_scale(float largest) {
  return largest > kTinyFp8Row ? kFp8Max / largest : 1.0F;
}
/// Of a row with infinity or NaN also the scale is not finite, and so is the product.
__device__ float scale_of(float largest) {
  return largest <= kTinyFp8Row ? 1.0F : largest / kFp8Max;
}

template <typename T>
__device__ void store_fp8(const Vector8<T>& vector, float inverse, uint8_t* to) {
  union {
    uint2 bits;
    __nv_fp8x2_storage_t pairs[kVector / 2];
  } out;
#pragma unroll
  for (int j = 0; j < kVector / 2; ++j) {
    out.pairs[j] = __nv_cvt_float2_to_fp8x2(
        {to_float(vector.values[2 * j]) * inverse, to_float(vector.values[2 * j + 1]) * inverse},
        __NV_SATFINITE, __NV_E4M3);
  }
  *reinterpret_cast<uint2*>(to) = out.bits;
}

template <typename T, int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads)
    quantize_rows(const T* in, int64_t columns, uint8_t* values, float* scales) {
  const int64_t begin = blockIdx.x * columns;
  Vector8<T> row[kVectors];
  Magnitude<T> own;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t c = (v * kThreads + static_cast<int>(threadIdx.x)) * kVector;
    row[v].bits[0] = c < columns ? *reinterpret_cast<const uint4*>(in + begin + c) : uint4{};
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    own.add(row[v]);
  }
  const float largest = block_max<kThreads>(own.get());
  const float inverse = inverse_scale(largest);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t c = (v * kThreads + static_cast<int>(threadIdx.x)) * kVector;
    if (c < columns) {
      store_fp8(row[v], inverse, values + begin + c);
    }
  }
  if (threadIdx.x == 0) {
    scales[blockIdx.x] = scale_of(largest);
  }
}

template <typename T>
__device__ void round_to(Vector8<T>& to, const float (&values)[kVector]) {
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    to.values[j] = from_float<T>(values[j]);
  }
}

template <typename T, int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_fp8(const T* grad, const T* gate_up, int64_t width, T* grad_gate_up,
                        uint8_t* values, float* scales) {
  const int64_t begin = blockIdx.x * 2 * width;
  Vector8<T> of_gate[kVectors], of_up[kVectors];
  Magnitude<T> own;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t c = (v * kThreads + static_cast<int>(threadIdx.x)) * kVector;
    of_gate[v].bits[0] = of_up[v].bits[0] = {0, 0, 0, 0};
    if (c < width) {
      float gate[kVector], up[kVector];
      gated_gradients(grad + blockIdx.x * width + c, gate_up + begin + c,
                      gate_up + begin + width + c, gate, up);
      round_to(of_gate[v], gate);
      round_to(of_up[v], up);
      *reinterpret_cast<uint4*>(grad_gate_up + begin + c) = of_gate[v].bits[0];
      *reinterpret_cast<uint4*>(grad_gate_up + begin + width + c) = of_up[v].bits[0];
    }
    own.add(of_gate[v]);
    own.add(of_up[v]);
  }
  const float largest = block_max<kThreads>(own.get());
  const float inverse = inverse_scale(largest);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t c = (v * kThreads + static_cast<int>(threadIdx.x)) * kVector;
    if (c < width) {
      store_fp8(of_gate[v], inverse, values + begin + c);
      store_fp8(of_up[v], inverse, values + begin + width + c);
    }
  }
  if (threadIdx.x == 0) {
    scales[blockIdx.x] = scale_of(largest);
  }
}

}  // namespace

cudaError_t launch_quantize_rows(const void* in, Element element, int64_t rows, int64_t columns,
                                 void* values, float* scales, cudaStream_t stream) {
  return with_compute_type(element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto kernel, int threads) {
      kernel<<<static_cast<unsigned>(rows), threads, 0, stream>>>(
          static_cast<const T*>(in), columns, static_cast<uint8_t*>(values), scales);
      return cudaGetLastError();
    };
    if (columns <= 5 * 128 * kVector) {
      return launch(quantize_rows<T, 128, 5>, 128);
    }
    return columns <= 5 * 512 * kVector ? launch(quantize_rows<T, 512, 5>, 512)
                                        : launch(quantize_rows<T, 512, 10>, 512);
  });
}

cudaError_t launch_swiglu_backward_fp8(const void* grad, const void* gate_up, Element element,
                                       int64_t rows, int64_t width, void* grad_gate_up,
                                       void* values, float* scales, cudaStream_t stream) {
  return with_compute_type(element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto launch = [&](auto kernel, int threads) {
      kernel<<<static_cast<unsigned>(rows), threads, 0, stream>>>(
          static_cast<const T*>(grad), static_cast<const T*>(gate_up), width,
          static_cast<T*>(grad_gate_up), static_cast<uint8_t*>(values), scales);
      return cudaGetLastError();
    };
    return width <= 3 * 256 * kVector ? launch(swiglu_backward_fp8<T, 256, 3>, 256)
                                      : launch(swiglu_backward_fp8<T, 640, 4>, 640);
  });
}

}  // namespace ddp::ops::detail
