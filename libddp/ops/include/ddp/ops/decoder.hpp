// SPDX-License-Identifier: Apache-2.0
// Ops of decoders whose projections are separate tensors, as in transformers. The ops of
// language.hpp for joined projections make fewer passes. Kernels run under the same conditions.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::ops {

/// silu(gate) * up (Shazeer, arXiv:2002.05202). The kernel saves only gate and up, which must be
/// rows with one distance, as halves of longer rows are, too.
///
///   gate and up [..., width], of one dtype -> [..., width]
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// Rotary position embedding (Su et al., arXiv:2104.09864): x * cos + rotate_half(x) * sin, where
/// rotate_half([x1, x2]) = [-x2, x1] for the halves of the last dimension.
///
///   x [batch, heads, seq, head_dim], cos and sin broadcast to it, [batch or 1, 1, seq, head_dim]
///   -> as x, in the common dtype of x and cos
///
/// The kernel (in float32 too, for any even head_dim) computes in float32 and rounds once, and the
/// result has x's order in memory. It takes any strides of x but the last, which must be 1, and cos
/// and sin in x's dtype or float32. If these require a gradient, PyTorch's ops run.
at::Tensor apply_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

}  // namespace ddp::ops
