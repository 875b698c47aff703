// SPDX-License-Identifier: Apache-2.0
// Grad slots: where a parameter's gradient lives inside a bucket, so that a fused op can write its
// weight gradient straight there (no copy, no zeroing).
//
// A slot is *written* if and only if the parameter's .grad aliases it or an op wrote it in the
// running backward. zero_grad leaves .grad undefined, which means unwritten: no memset anywhere.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::ops {

/// One parameter's place in the gradient arena. Owned by whoever reduces gradients and attached to
/// the parameter tensor itself; ops find it with find_grad_slot.
struct GradSlot {
  at::Tensor memory;     ///< shaped and strided like the parameter, in the bucket's gradient dtype
  bool written = false;  ///< an op wrote `memory` in this backward (cleared when it ends)
};

/// Attaches `slot` (or, with nullptr, detaches) to `parameter`. The slot must outlive the
/// attachment.
void set_grad_slot(const at::Tensor& parameter, GradSlot* slot);

/// The slot of `parameter`, or nullptr where nobody reduces it: return a gradient as usual then.
GradSlot* find_grad_slot(const at::Tensor& parameter);

/// Announces that the caller overwrites or adds to `slot->memory` now. Returns the beta to use: 0
/// where the slot is unwritten, 1 where it already holds a part of this step's gradient. The op
/// then returns an undefined gradient for the parameter; AccumulateGrad's post hook fires all the
/// same.
double begin_grad_write(const at::Tensor& parameter, GradSlot& slot);

}  // namespace ddp::ops
