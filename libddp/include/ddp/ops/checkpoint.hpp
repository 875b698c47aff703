// SPDX-License-Identifier: Apache-2.0
// Activation checkpointing: memory for time.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace ddp::ops {

/// Runs `function(inputs)` without saving activations, and runs it again in the backward with the
/// same random numbers (torch.utils.checkpoint with use_reentrant=True). Apart from `inputs` and
/// parameters, `function` must not depend on anything that changes in between. It must use each
/// parameter in only one checkpointed call per backward. Parameter gradients arrive in a nested
/// backward, where torch::autograd::grad() does not find them. At least one input must require a
/// gradient, or no gradient flows.
at::Tensor checkpoint(const std::function<at::Tensor(const std::vector<at::Tensor>&)>& function,
                      const std::vector<at::Tensor>& inputs);

}  // namespace ddp::ops
