// SPDX-License-Identifier: Apache-2.0
// SwiGLU and rotary positions, forward and backward in one pass each.
#pragma once

#include <cstdint>

#include "ops/kernel_types.hpp"

namespace ddp::ops::detail {

/// out = silu(gate) * up. All of `count` elements (a multiple of 8) of bf16 or fp16, 16-byte
/// aligned.
cudaError_t launch_swiglu(const void* gate, const void* up, Element element, int64_t count,
                          void* out, cudaStream_t stream);
cudaError_t launch_swiglu_backward(const void* grad, const void* gate, const void* up,
                                   Element element, int64_t count, void* grad_gate, void* grad_up,
                                   cudaStream_t stream);

/// [batch, seq, heads, head_dim] with a dense last dimension; head_dim a multiple of 16, strides in
/// elements and multiples of 8.
struct RotaryShape {
  int64_t batch, seq, heads, head_dim;
  int64_t batch_stride, seq_stride, head_stride;  ///< of the input; the output is contiguous
  Element element;                                ///< bf16 or fp16
};

/// Rotates by the angles of each position, or by their opposites.
///
///   cos, sin float32 [batch, seq, head_dim / 2]
cudaError_t launch_rotary(const RotaryShape& shape, const void* x, const float* cos,
                          const float* sin, bool opposite, void* out, cudaStream_t stream);

}  // namespace ddp::ops::detail
