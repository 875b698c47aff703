// SPDX-License-Identifier: Apache-2.0
#include "ops/language/elementwise_kernels.hpp"

#include "ops/kernel_types.cuh"

namespace ddp::ops::detail {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;

__device__ float sigmoid(float x) {
  return 1.0F / (1.0F + __expf(-x));
}

template <typename T>
__global__ void swiglu(const T* gate, const T* up, int64_t count, T* out) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector;
  if (i >= count) {
    return;
  }
  float g[kVector], u[kVector];
  load8(gate + i, 1, g);
  load8(up + i, 1, u);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    u[j] *= g[j] * sigmoid(g[j]);
  }
  store8(out + i, 1, u);
}

template <typename T>
__global__ void swiglu_backward(const T* grad, const T* gate, const T* up, int64_t count,
                                T* grad_gate, T* grad_up) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector;
  if (i >= count) {
    return;
  }
  float d[kVector], g[kVector], u[kVector];
  load8(grad + i, 1, d);
  load8(gate + i, 1, g);
  load8(up + i, 1, u);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const float s = sigmoid(g[j]);
    u[j] *= d[j] * s * (1.0F + g[j] * (1.0F - s));
    d[j] *= g[j] * s;
  }
  store8(grad_gate + i, 1, u);
  store8(grad_up + i, 1, d);
}

/// A thread rotates eight pairs: elements c … c + 7 with those half a head further on.
template <typename T>
__global__ void rotary(RotaryShape shape, const T* x, const float* cos, const float* sin,
                       float direction, T* out) {
  const int64_t half = shape.head_dim / 2;
  const int64_t chunks = half / kVector;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t head_index = index / chunks;  // of all heads of all tokens
  const int64_t token = head_index / shape.heads;
  if (token >= shape.batch * shape.seq) {
    return;
  }
  const int64_t column = index % chunks * kVector;
  const T* const from = x + token / shape.seq * shape.batch_stride +
                        token % shape.seq * shape.seq_stride +
                        head_index % shape.heads * shape.head_stride + column;
  float a[kVector], b[kVector], c[kVector], s[kVector];
  load8(from, 1, a);
  load8(from + half, 1, b);
  load8(cos + token * half + column, 1, c);
  load8(sin + token * half + column, 1, s);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const float first = a[j] * c[j] - direction * (b[j] * s[j]);
    b[j] = b[j] * c[j] + direction * (a[j] * s[j]);
    a[j] = first;
  }
  T* const to = out + head_index * shape.head_dim + column;
  store8(to, 1, a);
  store8(to + half, 1, b);
}

}  // namespace

cudaError_t launch_swiglu(const void* gate, const void* up, Element element, int64_t count,
                          void* out, cudaStream_t stream) {
  return with_compute_type(element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    swiglu<<<num_blocks(count / kVector, kThreads), kThreads, 0, stream>>>(
        static_cast<const T*>(gate), static_cast<const T*>(up), count, static_cast<T*>(out));
    return cudaGetLastError();
  });
}

cudaError_t launch_swiglu_backward(const void* grad, const void* gate, const void* up,
                                   Element element, int64_t count, void* grad_gate, void* grad_up,
                                   cudaStream_t stream) {
  return with_compute_type(element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    swiglu_backward<<<num_blocks(count / kVector, kThreads), kThreads, 0, stream>>>(
        static_cast<const T*>(grad), static_cast<const T*>(gate), static_cast<const T*>(up), count,
        static_cast<T*>(grad_gate), static_cast<T*>(grad_up));
    return cudaGetLastError();
  });
}

cudaError_t launch_rotary(const RotaryShape& shape, const void* x, const float* cos,
                          const float* sin, bool opposite, void* out, cudaStream_t stream) {
  const int64_t threads = shape.batch * shape.seq * shape.heads * (shape.head_dim / 2 / kVector);
  return with_compute_type(shape.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    rotary<<<num_blocks(threads, kThreads), kThreads, 0, stream>>>(
        shape, static_cast<const T*>(x), cos, sin, opposite ? -1.0F : 1.0F, static_cast<T*>(out));
    return cudaGetLastError();
  });
}

}  // namespace ddp::ops::detail
