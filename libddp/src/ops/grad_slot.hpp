// SPDX-License-Identifier: Apache-2.0
// Grad slots: the place of a parameter's gradient in a bucket. A fused op writes its weight
// gradient straight into the slot (no copy, no zeroing).
//
// A slot is *written* if and only if the parameter's .grad aliases the slot or an op wrote the slot
// in the running backward. zero_grad makes .grad undefined, so the slot is unwritten without a
// memset.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>

namespace ddp::ops {

/// One parameter's place in the gradient arena, which owns it. A registry maps parameters to their
/// slots: the arena registers its slots for as long as it lives, and ops ask find_grad_slot.
struct GradSlot {
  at::Tensor memory;     ///< shaped and strided like the parameter, in the bucket's gradient dtype
  bool written = false;  ///< an op wrote `memory` in this backward (cleared when it ends)
  /// The current stream of the last writer in this backward (not set on a CPU). It can differ from
  /// the stream of the parameter's hook, so readers of `memory` before the end of backward must
  /// wait for it.
  std::optional<c10::Stream> stream = std::nullopt;
  bool is_sharded = false;  ///< `memory` holds the mean in this rank's part only (ZeRO-1)
};

/// Registers `slot` as the slot of `parameter`; nullptr removes the entry. The slot must outlive
/// its entry. Thread-safe, as are the questions below.
void set_grad_slot(const at::Tensor& parameter, GradSlot* slot);

/// The slot of `parameter`. nullptr if no reducer owns the parameter, its memory was replaced
/// (set_data), or torch::autograd::grad() computes its gradient: the op then returns a gradient as
/// usual.
GradSlot* find_grad_slot(const at::Tensor& parameter);

/// The registered slot of `parameter`, even if its memory was replaced; nullptr: none.
const GradSlot* registered_grad_slot(const at::Tensor& parameter);

/// Whether `.grad` lies in a sharded slot, so that no code may use it as the whole mean.
bool has_sharded_gradient(const at::Tensor& parameter);

/// Announces a write or addition to `slot->memory`. Returns the beta to use: 0 for an unwritten
/// slot, 1 if the slot already holds a part of this step's gradient. The current stream waits for
/// the stream that wrote this part. The op then returns an undefined gradient for the parameter;
/// AccumulateGrad's post hook still fires.
double begin_grad_write(const at::Tensor& parameter, GradSlot& slot);

}  // namespace ddp::ops
