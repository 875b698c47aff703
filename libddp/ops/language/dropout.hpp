// SPDX-License-Identifier: Apache-2.0
// The end of a residual branch for the ops that include it, and the generator's numbers for their
// kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ddp/ops/language.hpp"
#include "ops/language/dropout_draws.hpp"

namespace ddp::ops::detail {

/// Raises if the parts do not fit each other. The residual may be undefined.
void check_branch(const char* op, const at::Tensor& branch, const at::Tensor& residual,
                  const BranchOptions& options);

/// The definition of ops::add_branch(), on any device.
at::Tensor add_branch_by_aten(const at::Tensor& branch, const at::Tensor& residual,
                              const BranchOptions& options);

/// An argument of an autograd Function, which accepts no undefined tensors.
inline std::optional<at::Tensor> optional_of(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

#ifdef DDP_HAS_CUDA
/// Reserves the numbers of `calls` calls of the generator of `device`. The kernel stores what it
/// used in `drawn`, int64 [2], which is allocated here. p = 0 reserves nothing.
DropoutDraws new_draws(double p, at::Device device, at::Tensor& drawn, uint64_t calls = 1);

/// The same numbers again, for the backward.
DropoutDraws repeated_draws(double p, const at::Tensor& drawn);

/// Gradients of a branch and of its bias, which may be undefined.
struct BranchGradients {
  at::Tensor branch, bias;
};
/// The backward of the kernels for `grad`, the gradient of residual + dropout(branch + bias).
BranchGradients branch_gradients(const at::Tensor& grad, const DropoutDraws& draws,
                                 const at::Tensor& bias, bool wants_bias);
#endif

}  // namespace ddp::ops::detail
