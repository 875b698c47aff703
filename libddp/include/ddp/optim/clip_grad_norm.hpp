// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "ddp/optim/make_optimizer.hpp"

namespace ddp {

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)), where norm is the `norm_type`-norm of
/// all of them seen as one vector, as torch.nn.utils.clip_grad_norm_ does. Undefined gradients are
/// skipped; half gradients are measured in float32.
///
/// Returns the norm before clipping as a 0-dim tensor on the first gradient's device (0 where there
/// is no gradient): the host does not wait. `max_norm` <= 0 measures and changes nothing.
at::Tensor clip_grad_norm_(const NamedParameters& parameters, double max_norm,
                           double norm_type = 2.0);

template <HasNamedParameters Model>
at::Tensor clip_grad_norm_(const Model& model, double max_norm, double norm_type = 2.0) {
  return clip_grad_norm_(model.named_parameters(), max_norm, norm_type);
}

}  // namespace ddp
