// SPDX-License-Identifier: Apache-2.0
// SwiGLU and rotary positions, forward and backward in one pass each.
#pragma once

#include <cstdint>

#include "ops/kernel_types.hpp"

namespace ddp::ops::detail {

/// gate_up [rows, 2 width] -> out [rows, width] = silu(gate) * up, where gate is the first half of
/// a row. Of bf16 or fp16, 16-byte aligned; width is a multiple of 8.
cudaError_t launch_swiglu(const void* gate_up, Element element, int64_t rows, int64_t width,
                          void* out, cudaStream_t stream);
/// grad [rows, width] -> grad_gate_up [rows, 2 width]
cudaError_t launch_swiglu_backward(const void* grad, const void* gate_up, Element element,
                                   int64_t rows, int64_t width, void* grad_gate_up,
                                   cudaStream_t stream);

/// [batch, seq, heads, head_dim] with a dense last dimension; strides in elements, multiples of 8.
struct HeadSource {
  const void* data = nullptr;
  int64_t heads = 0;
  int64_t batch_stride = 0, seq_stride = 0, head_stride = 0;
};
/// Up to three sources of heads, which lie side by side in rows of `width` elements.
struct HeadRows {
  int64_t batch, seq, width, head_dim;  ///< head_dim a multiple of 16
  Element element;                      ///< bf16 or fp16
  HeadSource sources[3] = {};
};

/// Rotates the heads of the first two sources by the angles of each position, or by their
/// opposites, and copies those of the third. A source may be the same place of `out`.
///
///   cos, sin float32 [batch, seq, head_dim / 2], nullptr: all are copied
///   out [batch, seq, width]
///   parts float32 [num_head_parts(), width]: sums over tokens, which launch_add_parts() adds;
///   nullptr: not wanted
cudaError_t launch_rotary(const HeadRows& rows, const float* cos, const float* sin, bool opposite,
                          void* out, float* parts, cudaStream_t stream);
int num_head_parts(const HeadRows& rows);

}  // namespace ddp::ops::detail
