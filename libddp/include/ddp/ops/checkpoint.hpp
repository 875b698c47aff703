// SPDX-License-Identifier: Apache-2.0
// Activation checkpointing: memory for time.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace ddp::ops {

/// Runs `function(inputs)` without keeping what its backward needs, and runs it again in the
/// backward, with the random numbers of the first time (torch.utils.checkpoint with
/// use_reentrant=True). `function` must depend on nothing that changes meanwhile but `inputs` and
/// parameters, and use each parameter in one checkpointed call a backward: its gradient arrives in
/// a backward of its own, where torch::autograd::grad() does not find it. At least one input must
/// require a gradient, or none flows.
at::Tensor checkpoint(const std::function<at::Tensor(const std::vector<at::Tensor>&)>& function,
                      const std::vector<at::Tensor>& inputs);

}  // namespace ddp::ops
