// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "ddp/optim/make_optimizer.hpp"

namespace ddp {

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_
/// does. norm is the `norm_type`-norm of all gradients as one vector. Undefined gradients are
/// skipped. Powers are summed in float64, so finite gradients of any size are limited.
///
/// Throws SettingsError for gradients sharded over the ranks (OptimizerOptions::zero1): use the
/// overload for a model.
///
/// Returns the norm before clipping as a 0-dim tensor on the first gradient's device (0 without
/// gradients). The host does not wait. `max_norm` <= 0 only measures.
at::Tensor clip_grad_norm_(const NamedParameters& parameters, double max_norm,
                           double norm_type = 2.0);

namespace detail {
at::Tensor clip_gradients_of(const DataParallelModel& model, double max_norm, double norm_type);
}

/// The same for a model. Collective for a data-parallel model with sharded gradients
/// (OptimizerOptions::zero1); `norm_type` must then be more than 0.
template <HasNamedParameters Model>
at::Tensor clip_grad_norm_(const Model& model, double max_norm, double norm_type = 2.0) {
  if constexpr (std::derived_from<Model, DataParallelModel>) {
    return detail::clip_gradients_of(model, max_norm, norm_type);
  } else {
    return clip_grad_norm_(model.named_parameters(), max_norm, norm_type);
  }
}

}  // namespace ddp
