// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ddp::detail {

/// Approximates U Vᵀ of each matrix U S Vᵀ in `batch` [k, rows, cols] with rows <= cols, by
/// `num_steps` Newton-Schulz steps with the coefficients of Keller Jordan's Muon. All products are
/// computed in `dtype`, which is also that of the result. A matrix of zeros stays zero. Results do
/// not depend on the other matrices of the batch. The host does not wait.
at::Tensor newton_schulz(const at::Tensor& batch, at::ScalarType dtype, int64_t num_steps);

}  // namespace ddp::detail
