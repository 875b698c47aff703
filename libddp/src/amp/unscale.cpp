// SPDX-License-Identifier: Apache-2.0
#include "amp/unscale.hpp"

#include <ATen/Functions.h>

#include <limits>

namespace ddp::detail {

void check_and_unscale_composed_(at::TensorList grads, at::Tensor& found_inf,
                                 const at::Tensor& inverse_scale) {
  // The largest magnitude is finite exactly if all are; NaN propagates.
  const auto largest = at::stack(at::_foreach_norm(grads, std::numeric_limits<double>::infinity()));
  found_inf.copy_(at::maximum(
      found_inf, at::isfinite(largest).all().logical_not().to(found_inf.scalar_type())));
  for (const at::Tensor& grad : grads) {
    grad.copy_(grad.to(at::kFloat).mul_(inverse_scale));
  }
}

void check_and_unscale_(at::TensorList grads, at::Tensor& found_inf,
                        const at::Tensor& inverse_scale) {
  // ATen has no CUDA kernel for bfloat16. bfloat16 needs no loss scale but may be used with one.
  if (grads.front().is_cuda() && grads.front().scalar_type() == at::kBFloat16) {
    check_and_unscale_composed_(grads, found_inf, inverse_scale);
  } else {
    at::_amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse_scale);
  }
}

}  // namespace ddp::detail
