// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/Functions.h>

#include <optional>

#include "ddp/core/error.hpp"
#include "ddp/optim/optimizer.hpp"

namespace ddp::detail {

inline void require_lr(const StepScalars& scalars) {
  if (!scalars.lr.defined()) {
    throw SettingsError("Optimizer::step needs a learning rate: step({.lr = 0.1})");
  }
}

/// Whether the host knows that found_inf is 1. A device's found_inf is read by the kernels.
inline bool is_known_to_skip(const StepScalars& scalars) {
  return scalars.found_inf.value().value_or(0.0) != 0.0;
}

/// The product of the step's factors of gradients; nothing without factors.
inline std::optional<at::Tensor> factor_of(const StepScalars& scalars, at::Device device) {
  const StepScalar& a = scalars.inverse_scale;
  const StepScalar& b = scalars.clip_factor;
  if (a.defined() && b.defined()) {
    return at::mul(a.tensor(device), b.tensor(device));
  }
  return a.defined() || b.defined() ? std::optional((a.defined() ? a : b).tensor(device))
                                    : std::nullopt;
}

}  // namespace ddp::detail
