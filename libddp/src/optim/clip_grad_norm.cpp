// SPDX-License-Identifier: Apache-2.0
#include "ddp/optim/clip_grad_norm.hpp"

#include <ATen/Functions.h>

#include "ddp/core/error.hpp"
#include "optim/tensor_groups.hpp"

namespace ddp {
namespace {

at::Tensor total_norm(const std::vector<detail::TensorGroup>& groups, double norm_type) {
  const at::Device device = groups.front().device;
  std::vector<at::Tensor> norms;
  for (const detail::TensorGroup& group : groups) {
    const bool half = group.dtype == at::kBFloat16 || group.dtype == at::kHalf;
    const auto dtype = half ? std::optional(at::kFloat) : std::nullopt;
    for (const at::Tensor& norm : at::_foreach_norm(group.tensors, norm_type, dtype)) {
      norms.push_back(norm.to(device, /*non_blocking=*/true));
    }
  }
  return at::linalg_vector_norm(at::stack(norms), norm_type);
}

}  // namespace

at::Tensor clip_grad_norm_(const NamedParameters& parameters, double max_norm, double norm_type) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> grads;
  for (const NamedParameter& parameter : parameters) {
    const at::Tensor& grad = parameter.tensor.grad();
    if (!grad.defined()) {
      continue;
    }
    if (grad.layout() != at::kStrided) {
      throw SettingsError(detail::concat("clip_grad_norm_: the gradient of ", parameter.name,
                                         " is sparse; use a dense layer"));
    }
    grads.push_back(grad);
  }
  if (grads.empty()) {
    const auto device = parameters.empty() ? at::kCPU : parameters.front().tensor.device();
    return at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(device));
  }
  const std::vector<detail::TensorGroup> groups = detail::group_tensors(grads);
  const at::Tensor norm = total_norm(groups, norm_type);
  if (!(max_norm > 0.0)) {
    return norm;
  }
  // Multiplying by a factor that is often 1 costs less than asking the device whether it is.
  const at::Tensor factor = at::clamp_max(at::reciprocal(norm + 1e-6) * max_norm, 1.0);
  for (const detail::TensorGroup& group : groups) {
    at::_foreach_mul_(group.tensors, factor.to(group.device, /*non_blocking=*/true));
  }
  return norm;
}

}  // namespace ddp
