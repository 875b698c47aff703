// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ddp/optim/optimizer.hpp"

namespace ddp::detail {

/// Sets norm and clip_factor of a scan, both of `dtype`, from the float64 norm of the unscaled
/// gradients.
void conclude_norm(GradientScan& scan, const at::Tensor& norm, double max_norm,
                   at::ScalarType dtype);

}  // namespace ddp::detail
