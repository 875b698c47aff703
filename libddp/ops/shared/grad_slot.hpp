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
/// slots: the arena registers its slots for as long as it lives, and ops ask find_grad_slot. A
/// parameter of several wrapped models has a slot in the arena of each.
struct GradSlot {
  at::Tensor memory;     ///< shaped and strided like the parameter, in the bucket's gradient dtype
  bool written = false;  ///< an op wrote `memory` in this backward (cleared when it ends)
  /// The current stream of the last writer in this backward (not set on a CPU). It can differ from
  /// the stream of the parameter's hook, so readers of `memory` before the end of backward must
  /// wait for it.
  std::optional<c10::Stream> stream = std::nullopt;
  bool is_sharded = false;  ///< `memory` holds the mean in this rank's part only (ZeRO-1)
  bool reduced = false;     ///< `memory` holds a mean, to which gradients may have been added
  bool added_to = false;    ///< of a shared parameter: local gradients were added to the mean
};

/// Registers `slot` as a slot of `parameter` in its present memory. The slot must outlive its
/// entry. Thread-safe, as are the functions below.
void add_grad_slot(const at::Tensor& parameter, GradSlot& slot);
/// Undoes add_grad_slot().
void remove_grad_slot(const at::Tensor& parameter, const GradSlot& slot);

/// The slot to which an op writes the gradient of `parameter` in the running backward. nullptr: the
/// op returns a gradient as usual, because
/// - no reducer owns the parameter, or several do and each needs the gradient;
/// - its memory was replaced (set_data);
/// - hooks of the user's read the gradient, or torch::autograd::grad() computes it;
/// - the parameter was frozen after the forward, so AccumulateGrad ignores the gradient.
GradSlot* find_grad_slot(const at::Tensor& parameter);

/// Whether several reducers own `parameter`.
bool has_several_grad_slots(const at::Tensor& parameter);

/// The slot in whose arena `.grad` lies, of any reducer that owns `parameter`; nullptr: none.
GradSlot* slot_of_grad(const at::Tensor& parameter);

/// Whether `.grad` lies in a sharded slot, so that no code may use it as the whole mean.
bool has_sharded_gradient(const at::Tensor& parameter);

/// Announces a write or addition to `slot->memory`. Returns the beta to use: 0 for an unwritten
/// slot, 1 if the slot already holds a part of this step's gradient. The current stream waits for
/// the stream that wrote this part. The op then returns an undefined gradient for the parameter;
/// AccumulateGrad's post hook still fires.
double begin_grad_write(const at::Tensor& parameter, GradSlot& slot);

}  // namespace ddp::ops
