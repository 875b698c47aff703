// SPDX-License-Identifier: Apache-2.0
// Weight gradients beside the chain of input gradients. Nothing in a backward waits for a weight's
// gradient, so it may be made on a second stream, also inside a CUDA graph, where it becomes a
// branch. It pays where kernels are too short to fill the GPU.
#pragma once

#include <cstdint>

namespace ddp::ops {

/// While one lives, ops whose forward runs on this thread (conv2d, stem_convolution excepted: its
/// gradient is the last) note that their weight gradients be made on a side stream, which goes with
/// the stream of the op: those of parameters with a grad slot (grad_slot.hpp), on CUDA. Scopes
/// nest; one of `enabled` false switches the branch off inside.
///
/// The end of a backward waits for the side stream (the caller's stream does, never the host), so
/// gradients are complete after backward() as always. Whoever looks at a slot earlier, in a hook of
/// the parameter, must make its stream wait for GradSlot::stream.
///
/// Tensors that the branch reads stay alive until the backward waits for it: at its end, or
/// earlier, whenever they exceed `max_held_bytes` or that of a scope around this one.
class WgradBranch {
 public:
  explicit WgradBranch(bool enabled = true, int64_t max_held_bytes = int64_t{1} << 30);
  ~WgradBranch();
  WgradBranch(const WgradBranch&) = delete;
  WgradBranch& operator=(const WgradBranch&) = delete;

  /// The bytes that this thread's innermost scope lets an op hold; 0: no branch is open.
  static int64_t current_limit();

 private:
  int64_t outer_limit_;
};

}  // namespace ddp::ops
