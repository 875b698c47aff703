// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <cstddef>

#include "ops/shared/grad_slot.hpp"
#include "ops/tensor_launch.hpp"

namespace ddp::ops::detail {

/// The target of a parameter's gradient: its grad slot, or a new tensor like the parameter.
struct GradTarget {
  at::Tensor memory;
  double beta = 0;  ///< factor of `memory`'s old values: 0 or 1
  bool is_slot = false;

  /// The op's backward returns this for the parameter.
  at::Tensor result() const { return is_slot ? at::Tensor() : memory; }

  /// memory = beta memory + gradient, for ops that computed the gradient in other memory.
  void write(const at::Tensor& gradient) const {
    if (beta == 0) {
      memory.copy_(gradient);
    } else {
      memory.add_(gradient);
    }
  }
};

/// `wanted` is needs_input_grad() of the op's node. If false, there is no memory, and the op writes
/// no gradient. requires_grad() would not do: it may have changed since the forward.
inline GradTarget grad_target(const at::Tensor& parameter, bool wanted) {
  if (!wanted) {
    return {};
  }
  if (GradSlot* slot = find_grad_slot(parameter)) {
    const double beta = begin_grad_write(parameter, *slot);
    return {slot->memory, beta, true};
  }
  return {at::empty_like(parameter), 0, false};
}

/// Whether the gradient of each argument of an op's forward is wanted, in their order, where
/// `present` tells which of them were tensors: needs_input_grad() does not count absent ones.
template <std::size_t n>
std::array<bool, n> wanted_gradients(torch::autograd::AutogradContext* ctx,
                                     const bool (&present)[n]) {
  std::array<bool, n> wanted{};
  std::size_t edge = 0;
  for (std::size_t i = 0; i < n; ++i) {
    wanted[i] = present[i] && ctx->needs_input_grad(edge++);
  }
  return wanted;
}

#ifdef DDP_HAS_CUDA
/// The target for a kernel; its memory must be contiguous. It has the strides of its parameter.
inline GradOut grad_out(const GradTarget& target) {
  if (!target.memory.defined()) {
    return {};
  }
  TORCH_INTERNAL_ASSERT(target.memory.is_contiguous(), "a kernel would write a gradient of shape ",
                        target.memory.sizes(), " as if its strides were not ",
                        target.memory.strides());
  return {target.memory.mutable_data_ptr(), element_of(target.memory.scalar_type()),
          static_cast<float>(target.beta)};
}
#endif

}  // namespace ddp::ops::detail
