// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/Functions.h>

#include <optional>

#include "ddp/core/error.hpp"
#include "ddp/optim/optimizer.hpp"

namespace ddp::detail {

inline void require_lr(const StepScalars& scalars) {
  if (!scalars.lr.defined()) {
    throw SettingsError(
        "Optimizer::step needs a learning rate, because this optimizer stores none; fix: step(0.1) "
        "or step(lr_schedule.at(step)). Only optimizers of wrap_optimizer have rates of their own");
  }
}

/// Whether the host knows that found_inf is 1. A device's found_inf is read by the kernels.
inline bool is_known_to_skip(const StepScalars& scalars) {
  return scalars.found_inf.value().value_or(0.0) != 0.0;
}

/// The number itself. The host waits for one of the device.
inline double host_value(const StepScalar& scalar) {
  return scalar.value() ? *scalar.value() : scalar.tensor(at::kCPU).item<double>();
}

/// Raises the version counters of the parameters with a gradient, as in-place operations do. A
/// backward that saved their old values then throws instead of reading the new ones.
inline void bump_versions(const NamedParameters& parameters) {
  for (const NamedParameter& parameter : parameters) {
    if (parameter.tensor.grad().defined()) {
      parameter.tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

/// `factor` on `device`, for gradients of `dtype`. float64 gradients get the host's number as it
/// is, others get it rounded to float32, as the flat kernels read it.
inline at::Tensor factor_tensor(const StepScalar& factor, at::Device device, at::ScalarType dtype) {
  if (factor.value() && dtype == at::kDouble) {
    return at::full({}, *factor.value(), at::TensorOptions().dtype(at::kDouble).device(device));
  }
  return factor.tensor(device);
}

/// The product of the step's factors of gradients of `dtype`; nothing without factors.
inline std::optional<at::Tensor> factor_of(const StepScalars& scalars, at::Device device,
                                           at::ScalarType dtype) {
  const StepScalar& a = scalars.inverse_scale;
  const StepScalar& b = scalars.clip_factor;
  if (a.defined() && b.defined()) {
    return at::mul(factor_tensor(a, device, dtype), factor_tensor(b, device, dtype));
  }
  return a.defined() || b.defined()
             ? std::optional(factor_tensor(a.defined() ? a : b, device, dtype))
             : std::nullopt;
}

}  // namespace ddp::detail
