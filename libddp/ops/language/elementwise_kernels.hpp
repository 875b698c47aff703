// SPDX-License-Identifier: Apache-2.0
// SwiGLU and rotary positions, forward and backward in one pass each.
#pragma once

#include <cstdint>

#include "ops/kernel_types.hpp"

namespace ddp::ops::detail {

/// Rows of gate and up, and of their gradients: bf16 or fp16, 16-byte aligned.
struct GatedRows {
  int64_t rows, width;  ///< width a multiple of 8
  Element element;
  const void *gate, *up;
  int64_t gate_stride, up_stride;  ///< between rows, in elements, multiples of 8
};
/// out [rows, width] = silu(gate) * up
cudaError_t launch_swiglu(const GatedRows& in, void* out, cudaStream_t stream);
/// grad [rows, width] -> the gradients of gate and up, whose rows are `grad_stride` apart.
cudaError_t launch_swiglu_backward(const GatedRows& in, const void* grad, void* grad_gate,
                                   void* grad_up, int64_t grad_stride, cudaStream_t stream);

/// [sizes[0], sizes[1], sizes[2], head_dim] with a dense last dimension; strides in elements.
struct RotaryOperand {
  const void* data = nullptr;
  int64_t strides[3] = {};
};
struct RotaryRows {
  uint32_t sizes[3] = {};
  uint32_t half;    ///< head_dim / 2; its product with the sizes is below 2^31
  Element in, out;  ///< of x and of the result; cos and sin have the wider one
  bool is_aligned;  ///< pointers to 16 bytes, and strides and `half` to 8 elements
  RotaryOperand x = {}, cos = {}, sin = {};
  int64_t out_strides[3] = {};
};
/// out = x * cos + [-x2, x1] * sin with x = [x1, x2], in float32. `backward`: `x` is the result's
/// gradient, and `out` that of x.
cudaError_t launch_apply_rotary(const RotaryRows& rows, bool backward, void* out,
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

/// Rotates the heads of the first two sources by the angles of each position, `backward` by their
/// opposites, and copies those of the third. A source may be the same place of `out`.
///
///   cos, sin float32 [batch, seq, head_dim / 2], nullptr: all are copied
///   out [batch, seq, width]
///   parts float32 [num_head_parts(), width]: sums over tokens, which launch_add_parts() adds;
///   nullptr: not wanted
cudaError_t launch_rotary(const HeadRows& rows, const float* cos, const float* sin, bool backward,
                          void* out, float* parts, cudaStream_t stream);
int num_head_parts(const HeadRows& rows);

}  // namespace ddp::ops::detail
