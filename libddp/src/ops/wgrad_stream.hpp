// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace ddp::ops::detail {

/// Runs `write`, which makes the gradient of `parameter` from `inputs` and writes it to
/// grad_target(parameter): now, on the current stream, or on the side stream where `limit` (from
/// WgradBranch::current_limit() at the op's forward) is not 0 and `parameter` has a slot. Inside a
/// backward only. Returns what `write` returned.
at::Tensor make_weight_gradient(const at::Tensor& parameter, int64_t limit,
                                const std::vector<at::Tensor>& inputs,
                                const std::function<at::Tensor()>& write);

}  // namespace ddp::ops::detail
