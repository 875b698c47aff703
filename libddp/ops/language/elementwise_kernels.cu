// SPDX-License-Identifier: Apache-2.0
#include "ops/language/elementwise_kernels.hpp"

#include <algorithm>

#include "ops/kernel_types.cuh"
#include "ops/language/gated_gradient.cuh"

namespace ddp::ops::detail {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;

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
  float of_gate[kVector], of_up[kVector];
  gated_gradients(grad + place.out, gate_up + place.gate, gate_up + place.gate + width, of_gate,
                  of_up);
  store8(grad_gate_up + place.gate, 1, of_gate);
  store8(grad_gate_up + place.gate + width, 1, of_up);
}

constexpr int kHeadLanes = 32;  // threads of a block with different columns
constexpr int kHeadRows = kThreads / kHeadLanes;
constexpr int kColumns = 2 * kVector;  // of a thread: c … c + 7 and those half a head further on
constexpr int64_t kHeadBlocks = 528;
constexpr int64_t kMinHeadPart = 32;  // tokens

/// The columns of a thread: number `slot` of all heads' pairs of vectors.
struct HeadSlot {
  int place, column;  // of the head in a row, within the head
};
__device__ HeadSlot head_slot(const HeadRows& rows, int lane) {
  const int chunks = static_cast<int>(rows.head_dim) / kColumns;
  const int slot = static_cast<int>(blockIdx.x) * kHeadLanes + lane;
  return {slot / chunks, slot % chunks * kVector};
}

/// Adds the block's rows and writes the sums of its columns.
__device__ void write_head_part(const HeadRows& rows, int num_heads, const float (&own)[kColumns],
                                float* parts) {
  __shared__ float sums[kHeadRows][kHeadLanes][kColumns + 1];
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    sums[threadIdx.y][threadIdx.x][j] = own[j];
  }
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.y * kHeadLanes + threadIdx.x);
  for (int i = thread; i < kHeadLanes * kColumns; i += kThreads) {
    const int lane = i / kColumns, j = i % kColumns;
    const HeadSlot slot = head_slot(rows, lane);
    if (slot.place < num_heads) {
      float sum = 0;
      for (int row = 0; row < kHeadRows; ++row) {
        sum += sums[row][lane][j];
      }
      const int64_t column = slot.place * rows.head_dim + slot.column + j % kVector +
                             j / kVector * (rows.head_dim / 2);
      parts[blockIdx.y * rows.width + column] = sum;
    }
  }
}

template <typename T>
__global__ void rotary(HeadRows rows, int num_heads, int part_tokens, const float* cos,
                       const float* sin, float direction, T* out, float* parts) {
  const int half = static_cast<int>(rows.head_dim) / 2;
  const HeadSlot slot = head_slot(rows, static_cast<int>(threadIdx.x));
  const int tokens = static_cast<int>(rows.batch * rows.seq), seq = static_cast<int>(rows.seq);
  const int first = static_cast<int>(blockIdx.y) * part_tokens;
  const int end = min(first + part_tokens, tokens);
  float own[kColumns] = {};
  if (slot.place < num_heads) {
    int head = slot.place, part = 0;
    while (head >= rows.sources[part].heads) {
      head -= static_cast<int>(rows.sources[part].heads);
      ++part;
    }
    const HeadSource& source = rows.sources[part];
    const bool rotates = cos != nullptr && part < 2;
#pragma unroll 2
    for (int token = first + static_cast<int>(threadIdx.y); token < end; token += kHeadRows) {
      const T* const from = static_cast<const T*>(source.data) + token / seq * source.batch_stride +
                            token % seq * source.seq_stride + head * source.head_stride +
                            slot.column;
      T* const to = out + token * rows.width + slot.place * rows.head_dim + slot.column;
      float a[kVector], b[kVector];
      load8(from, 1, a);
      load8(from + half, 1, b);
      if (rotates) {
        float c[kVector], s[kVector];
        load8(cos + int64_t{token} * half + slot.column, 1, c);
        load8(sin + int64_t{token} * half + slot.column, 1, s);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const float first_part = a[j] * c[j] - direction * (b[j] * s[j]);
          b[j] = b[j] * c[j] + direction * (a[j] * s[j]);
          a[j] = first_part;
        }
      }
      store8(to, 1, a);
      store8(to + half, 1, b);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        own[j] += a[j];
        own[kVector + j] += b[j];
      }
    }
  }
  if (parts != nullptr) {
    write_head_part(rows, num_heads, own, parts);
  }
}

int64_t num_heads_of(const HeadRows& rows) {
  int64_t heads = 0;
  for (const HeadSource& source : rows.sources) {
    heads += source.heads;
  }
  return heads;
}

unsigned num_head_blocks(const HeadRows& rows) {
  return num_blocks(num_heads_of(rows) * (rows.head_dim / kColumns), kHeadLanes);
}

int64_t tokens_of_part(const HeadRows& rows) {
  const int64_t parts = std::max<int64_t>(1, kHeadBlocks / num_head_blocks(rows));
  return std::max(kMinHeadPart, (rows.batch * rows.seq + parts - 1) / parts);
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

int num_head_parts(const HeadRows& rows) {
  const int64_t share = tokens_of_part(rows);
  return static_cast<int>((rows.batch * rows.seq + share - 1) / share);
}

cudaError_t launch_rotary(const HeadRows& rows, const float* cos, const float* sin, bool opposite,
                          void* out, float* parts, cudaStream_t stream) {
  const dim3 grid(num_head_blocks(rows), static_cast<unsigned>(num_head_parts(rows)));
  return with_compute_type(rows.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    rotary<<<grid, dim3(kHeadLanes, kHeadRows), 0, stream>>>(
        rows, static_cast<int>(num_heads_of(rows)), static_cast<int>(tokens_of_part(rows)), cos,
        sin, opposite ? -1.0F : 1.0F, static_cast<T*>(out), parts);
    return cudaGetLastError();
  });
}

}  // namespace ddp::ops::detail
