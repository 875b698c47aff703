// SPDX-License-Identifier: Apache-2.0
// Grad slots: where a parameter's gradient lives inside a bucket, so that a fused op can write its
// weight gradient straight there (no copy, no zeroing).
//
// A slot is *written* if and only if the parameter's .grad aliases it or an op wrote it in the
// running backward. zero_grad leaves .grad undefined, which means unwritten: no memset anywhere.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>

namespace ddp::ops {

/// One parameter's place in the gradient arena. Owned by whoever reduces gradients and attached to
/// the parameter tensor itself; ops find it with find_grad_slot.
struct GradSlot {
  at::Tensor memory;     ///< shaped and strided like the parameter, in the bucket's gradient dtype
  bool written = false;  ///< an op wrote `memory` in this backward (cleared when it ends)
  /// The stream (not of a CPU) that was current for the last writer of this backward. It need not
  /// be the one of the parameter's hook: whoever reads `memory` before the backward ends waits for
  /// it.
  std::optional<c10::Stream> stream = std::nullopt;
};

/// Attaches `slot` (or, with nullptr, detaches) to `parameter`. The slot must outlive the
/// attachment.
void set_grad_slot(const at::Tensor& parameter, GradSlot* slot);

/// The slot of `parameter`, or nullptr where nobody reduces it or torch::autograd::grad() asks for
/// its gradient: return one as usual then.
GradSlot* find_grad_slot(const at::Tensor& parameter);

/// Announces that the caller overwrites or adds to `slot->memory` now. Returns the beta to use: 0
/// where the slot is unwritten, 1 where it already holds a part of this step's gradient; the
/// current stream waits for another one that wrote that part. The op then returns an undefined
/// gradient for the parameter; AccumulateGrad's post hook fires all the same.
double begin_grad_write(const at::Tensor& parameter, GradSlot& slot);

}  // namespace ddp::ops
