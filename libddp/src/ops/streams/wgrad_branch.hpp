// SPDX-License-Identifier: Apache-2.0
// Weight gradients concurrent with the chain of input gradients. Nothing in a backward waits for a
// weight gradient, so a side stream can compute it; in a CUDA graph it becomes a branch. Useful for
// kernels too short to fill the GPU.
#pragma once

#include <cstdint>

namespace ddp::ops {

/// Ops whose forward runs on this thread in this scope compute their weight gradients on a side
/// stream of the op's stream. Applies to conv2d on CUDA, for parameters with a grad slot
/// (grad_slot.hpp). stem_convolution is excluded: its gradient is the last. Scopes nest; a scope
/// with `enabled` false disables the branch.
///
/// At the end of a backward the caller's stream, not the host, waits for the side stream, so
/// gradients are complete after backward(). A parameter's hook that reads a slot earlier must make
/// its stream wait for GradSlot::stream.
///
/// Tensors that the branch reads stay alive until the backward waits for the branch: at its end, or
/// earlier when they exceed `max_held_bytes` of this or an outer scope.
class WgradBranch {
 public:
  explicit WgradBranch(bool enabled = true, int64_t max_held_bytes = int64_t{1} << 30);
  ~WgradBranch();
  WgradBranch(const WgradBranch&) = delete;
  WgradBranch& operator=(const WgradBranch&) = delete;

  /// The bytes that this thread's innermost scope lets an op hold; 0: no open branch.
  static int64_t current_limit();

 private:
  int64_t outer_limit_;
};

}  // namespace ddp::ops
