// SPDX-License-Identifier: Apache-2.0
#pragma once

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

}  // namespace ddp::detail
