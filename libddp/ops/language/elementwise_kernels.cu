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
  int64_t row, column;
};
__device__ GatePlace gate_place(const GatedRows& in) {
  // Divides vectors in 32 bits: 64 bits would cost as much as the rest of the kernel.
  const unsigned vector = blockIdx.x * kThreads + threadIdx.x;
  const unsigned vectors = static_cast<unsigned>(in.width / kVector);
  const unsigned row = vector / vectors;
  return {row, int64_t{vector - row * vectors} * kVector};
}

template <typename T>
__global__ void swiglu(GatedRows in, T* out) {
  const auto [row, column] = gate_place(in);
  if (row >= in.rows) {
    return;
  }
  float g[kVector], u[kVector];
  load8(static_cast<const T*>(in.gate) + row * in.gate_stride + column, 1, g);
  load8(static_cast<const T*>(in.up) + row * in.up_stride + column, 1, u);
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    u[j] *= g[j] * sigmoid(g[j]);
  }
  store8(out + row * in.width + column, 1, u);
}

template <typename T>
__global__ void swiglu_backward(GatedRows in, const T* grad, T* grad_gate, T* grad_up,
                                int64_t grad_stride) {
  const auto [row, column] = gate_place(in);
  if (row >= in.rows) {
    return;
  }
  float of_gate[kVector], of_up[kVector];
  gated_gradients(grad + row * in.width + column,
                  static_cast<const T*>(in.gate) + row * in.gate_stride + column,
                  static_cast<const T*>(in.up) + row * in.up_stride + column, of_gate, of_up);
  store8(grad_gate + row * grad_stride + column, 1, of_gate);
  store8(grad_up + row * grad_stride + column, 1, of_up);
}

/// Each thread rotates kCount values, eight or one, of a head's first half with those of its
/// second.
template <int kCount, typename In, typename Angle, typename Out>
__global__ void apply_rotary(RotaryRows rows, bool backward, Out* out) {
  const unsigned thread = blockIdx.x * kThreads + threadIdx.x;
  const unsigned packs = rows.half / kCount, row = thread / packs;
  const unsigned column = (thread - row * packs) * kCount;
  const unsigned outer = row / rows.sizes[2], first = outer / rows.sizes[1];
  if (first >= rows.sizes[0]) {
    return;
  }
  const unsigned second = outer - first * rows.sizes[1], third = row - outer * rows.sizes[2];
  const auto place = [&](const int64_t(&strides)[3]) {
    return first * strides[0] + second * strides[1] + third * strides[2] + column;
  };
  const auto load = [&](auto tag, const RotaryOperand& from, float(&a)[kCount], float(&b)[kCount]) {
    const auto* const data =
        static_cast<const typename decltype(tag)::type*>(from.data) + place(from.strides);
    if constexpr (kCount == kVector) {
      load_vector8(data, a);
      load_vector8(data + rows.half, b);
    } else {
      a[0] = to_float(data[0]);
      b[0] = to_float(data[rows.half]);
    }
  };
  float a[kCount], b[kCount], cos_a[kCount], cos_b[kCount], sin_a[kCount], sin_b[kCount];
  load(TypeTag<In>{}, rows.x, a, b);
  load(TypeTag<Angle>{}, rows.cos, cos_a, cos_b);
  load(TypeTag<Angle>{}, rows.sin, sin_a, sin_b);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const float of_b = backward ? sin_b[j] : -sin_a[j], of_a = backward ? -sin_a[j] : sin_b[j];
    const float rotated = a[j] * cos_a[j] + b[j] * of_b;
    b[j] = b[j] * cos_b[j] + a[j] * of_a;
    a[j] = rotated;
  }
  Out* const to = out + place(rows.out_strides);
  if constexpr (kCount == kVector) {
    store_vector8(to, a);
    store_vector8(to + rows.half, b);
  } else {
    to[0] = from_float<Out>(a[0]);
    to[rows.half] = from_float<Out>(b[0]);
  }
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

cudaError_t launch_swiglu(const GatedRows& in, void* out, cudaStream_t stream) {
  return with_compute_type(in.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    swiglu<<<num_blocks(in.rows * in.width / kVector, kThreads), kThreads, 0, stream>>>(
        in, static_cast<T*>(out));
    return cudaGetLastError();
  });
}

cudaError_t launch_swiglu_backward(const GatedRows& in, const void* grad, void* grad_gate,
                                   void* grad_up, int64_t grad_stride, cudaStream_t stream) {
  return with_compute_type(in.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    swiglu_backward<<<num_blocks(in.rows * in.width / kVector, kThreads), kThreads, 0, stream>>>(
        in, static_cast<const T*>(grad), static_cast<T*>(grad_gate), static_cast<T*>(grad_up),
        grad_stride);
    return cudaGetLastError();
  });
}

cudaError_t launch_apply_rotary(const RotaryRows& rows, bool backward, void* out,
                                cudaStream_t stream) {
  const int64_t pairs = int64_t{rows.sizes[0]} * rows.sizes[1] * rows.sizes[2] * rows.half;
  const auto launch = [&](auto in, auto angle, auto to) {
    using In = typename decltype(in)::type;
    using Angle = typename decltype(angle)::type;
    using Out = typename decltype(to)::type;
    const auto call = [&](auto kernel, int count) {
      kernel<<<num_blocks(pairs / count, kThreads), kThreads, 0, stream>>>(rows, backward,
                                                                           static_cast<Out*>(out));
    };
    rows.is_aligned ? call(apply_rotary<kVector, In, Angle, Out>, kVector)
                    : call(apply_rotary<1, In, Angle, Out>, 1);
    return cudaGetLastError();
  };
  // Angles in float32 widen a narrow input, and the gradient becomes narrow again.
  if (rows.in == rows.out) {
    return with_float_type(rows.in, [&](auto type) { return launch(type, type, type); });
  }
  const TypeTag<float> wide;
  return rows.in == Element::Float32
             ? with_compute_type(rows.out, [&](auto type) { return launch(wide, wide, type); })
             : with_compute_type(rows.in, [&](auto type) { return launch(type, wide, wide); });
}

int num_head_parts(const HeadRows& rows) {
  const int64_t share = tokens_of_part(rows);
  return static_cast<int>((rows.batch * rows.seq + share - 1) / share);
}

cudaError_t launch_rotary(const HeadRows& rows, const float* cos, const float* sin, bool backward,
                          void* out, float* parts, cudaStream_t stream) {
  const dim3 grid(num_head_blocks(rows), static_cast<unsigned>(num_head_parts(rows)));
  return with_compute_type(rows.element, [&](auto tag) {
    using T = typename decltype(tag)::type;
    rotary<<<grid, dim3(kHeadLanes, kHeadRows), 0, stream>>>(
        rows, static_cast<int>(num_heads_of(rows)), static_cast<int>(tokens_of_part(rows)), cos,
        sin, backward ? -1.0F : 1.0F, static_cast<T*>(out), parts);
    return cudaGetLastError();
  });
}

}  // namespace ddp::ops::detail
