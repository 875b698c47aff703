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

/// The place of a thread's eight elements.
struct GatePlace {
  int64_t out;   // in rows of `width`
  int64_t gate;  // in rows of two halves
};
__device__ GatePlace gate_place(int64_t width) {
  // Divides vectors in 32 bits: 64 bits would cost as much as the rest of the kernel.
  const unsigned vector = blockIdx.x * kThreads + threadIdx.x;
  const unsigned row = vector / static_cast<unsigned>(width / kVector);
  const int64_t i = int64_t{vector} * kVector;
  return {i, i + row * width};
}

template <typename T>
__global__ void swiglu(const T* gate_up, int64_t rows, int64_t width, T* out) {
  const GatePlace place = gate_place(width);
  if (place.out >= rows * width) {
    return;
  }
  float g[kVector], u[kVector];
  load8(gate_up + place.gate, 1, g);
  load8(gate_up + place.gate + width, 1, u);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    u[j] *= g[j] * sigmoid(g[j]);
  }
  store8(out + place.out, 1, u);
}

template <typename T>
__global__ void swiglu_backward(const T* grad, const T* gate_up, int64_t rows, int64_t width,
                                T* grad_gate_up) {
  const GatePlace place = gate_place(width);
  if (place.out >= rows * width) {
    return;
  }
  float d[kVector], g[kVector], u[kVector];
  load8(grad + place.out, 1, d);
  load8(gate_up + place.gate, 1, g);
  load8(gate_up + place.gate + width, 1, u);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    const float s = sigmoid(g[j]);
    u[j] *= d[j] * s * (1.0F + g[j] * (1.0F - s));
    d[j] *= g[j] * s;
  }
  store8(grad_gate_up + place.gate, 1, u);
  store8(grad_gate_up + place.gate + width, 1, d);
}

/// A thread rotates eight pairs: elements c … c + 7 with those half a head further on.
template <typename T>
__global__ void rotary(HeadRows rows, int num_heads, const float* cos, const float* sin,
                       float direction, T* out) {
  const int half = static_cast<int>(rows.head_dim) / 2;
  const int chunks = half / kVector;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t head_index = index / chunks;  // of all heads of all tokens
  const int64_t token = head_index / num_heads;
  if (token >= rows.batch * rows.seq) {
    return;
  }
  const int column = static_cast<int>(index % chunks) * kVector;
  const int place = static_cast<int>(head_index % num_heads);
  int head = place, part = 0;
  while (head >= rows.sources[part].heads) {
    head -= static_cast<int>(rows.sources[part].heads);
    ++part;
  }
  const HeadSource& source = rows.sources[part];
  const T* const from = static_cast<const T*>(source.data) +
                        token / rows.seq * source.batch_stride +
                        token % rows.seq * source.seq_stride + head * source.head_stride + column;
  T* const to = out + token * rows.width + place * rows.head_dim + column;
  float a[kVector], b[kVector];
  load8(from, 1, a);
  load8(from + half, 1, b);
  if (cos != nullptr && part < 2) {
    float c[kVector], s[kVector];
    load8(cos + token * half + column, 1, c);
    load8(sin + token * half + column, 1, s);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float first = a[j] * c[j] - direction * (b[j] * s[j]);
      b[j] = b[j] * c[j] + direction * (a[j] * s[j]);
      a[j] = first;
    }
  }
  store8(to, 1, a);
  store8(to + half, 1, b);
}

}  // namespace

cudaError_t launch_swiglu(const void* gate_up, Element element, int64_t rows, int64_t width,
                          void* out, cudaStream_t stream) {
  return with_compute_type(element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    swiglu<<<num_blocks(rows * width / kVector, kThreads), kThreads, 0, stream>>>(
        static_cast<const T*>(gate_up), rows, width, static_cast<T*>(out));
    return cudaGetLastError();
  });
}

cudaError_t launch_swiglu_backward(const void* grad, const void* gate_up, Element element,
                                   int64_t rows, int64_t width, void* grad_gate_up,
                                   cudaStream_t stream) {
  return with_compute_type(element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    swiglu_backward<<<num_blocks(rows * width / kVector, kThreads), kThreads, 0, stream>>>(
        static_cast<const T*>(grad), static_cast<const T*>(gate_up), rows, width,
        static_cast<T*>(grad_gate_up));
    return cudaGetLastError();
  });
}

cudaError_t launch_rotary(const HeadRows& rows, const float* cos, const float* sin, bool opposite,
                          void* out, cudaStream_t stream) {
  int64_t num_heads = 0;
  for (const HeadSource& source : rows.sources) {
    num_heads += source.heads;
  }
  const int64_t threads = rows.batch * rows.seq * num_heads * (rows.head_dim / 2 / kVector);
  return with_compute_type(rows.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    rotary<<<num_blocks(threads, kThreads), kThreads, 0, stream>>>(
        rows, static_cast<int>(num_heads), cos, sin, opposite ? -1.0F : 1.0F, static_cast<T*>(out));
    return cudaGetLastError();
  });
}

}  // namespace ddp::ops::detail
