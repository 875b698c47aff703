// SPDX-License-Identifier: Apache-2.0
#include "ddp/optim/make_optimizer.hpp"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>

#include "ddp/core/error.hpp"
#include "ddp/reduce/data_parallel_model.hpp"
#include "ops/shared/grad_slot.hpp"
#include "optim/on_device.hpp"
#include "optim/stored_values.hpp"
#include "optim/tensor_groups.hpp"
#include "optim/zero/shards.hpp"
#include "reduce/reducer.hpp"
#include "reduce/step_guard.hpp"

namespace ddp {
namespace {

// Clips the gradients. `norm` is their float64 norm. Returns the norm in their own precision.
at::Tensor scale(const std::vector<detail::TensorGroup>& groups, const at::Tensor& norm,
                 double max_norm) {
  const bool wide = std::any_of(groups.begin(), groups.end(), [](const detail::TensorGroup& group) {
    return group.dtype == at::kDouble;
  });
  const at::ScalarType dtype = wide ? at::kDouble : at::kFloat;
  if (max_norm > 0.0) {
    // Multiplying by a factor of 1 costs less than reading the factor from the device.
    const at::Tensor factor = at::clamp_max(at::reciprocal(norm + 1e-6) * max_norm, 1.0).to(dtype);
    for (const detail::TensorGroup& group : groups) {
      at::_foreach_mul_(group.tensors, detail::on_device(factor, group.device));
    }
  }
  return norm.to(dtype);
}

// The norm over all ranks, from each rank's norm of its part.
at::Tensor norm_over_ranks(const at::Tensor& own, double norm_type, Communicator& communicator) {
  const bool is_maximum = std::isinf(norm_type);
  at::Tensor sum = is_maximum ? own.clone() : own.pow(norm_type);
  communicator.all_reduce(sum, is_maximum ? ReduceOp::Max : ReduceOp::Sum)->wait();
  return is_maximum ? sum : sum.pow(1.0 / norm_type);
}

// In float64: the power of a gradient may overflow its own dtype. An infinite norm would set the
// factor, and every gradient, to 0.
at::Tensor total_norm(const std::vector<detail::TensorGroup>& groups, double norm_type) {
  const at::Device device = groups.front().device;
  std::vector<at::Tensor> norms;
  for (const detail::TensorGroup& group : groups) {
    for (const at::Tensor& norm : at::_foreach_norm(group.tensors, norm_type, at::kDouble)) {
      norms.push_back(detail::on_device(norm, device));
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
    if (ops::has_sharded_gradient(parameter.tensor)) {
      throw SettingsError(concat(
          "clip_grad_norm_: with optimizer.zero1=true each rank has a part of the gradient of ",
          parameter.name, ": give clip_grad_norm_ the model, not a list of parameters"));
    }
    const at::Tensor values = detail::stored_values(grad, "clip_grad_norm_", parameter.name);
    if (values.numel() > 0) {  // an empty tensor has no infinity norm
      grads.push_back(values);
    }
  }
  if (grads.empty()) {
    const auto device = parameters.empty() ? at::kCPU : parameters.front().tensor.device();
    return at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(device));
  }
  const std::vector<detail::TensorGroup> groups = detail::group_tensors(grads);
  return scale(groups, total_norm(groups, norm_type), max_norm);
}

at::Tensor clip_grad_norm_(const DataParallelModel& model, double max_norm, double norm_type) {
  detail::StepGuard::check_ended(model.trained_parameters());
  if (!model.reducer().gradients().is_sharded()) {
    return clip_grad_norm_(model.trained_parameters(), max_norm, norm_type);
  }
  if (!(norm_type > 0.0)) {
    throw SettingsError(concat("clip_grad_norm_: norm_type is ", norm_type,
                               ": must be more than 0 with optimizer.zero1=true"));
  }
  const at::NoGradGuard no_grad;
  Communicator& communicator = *model.communicator();
  std::vector<at::Tensor> own = detail::own_gradients(model.reducer().gradients(), communicator);
  std::erase_if(own, [](const at::Tensor& gradient) { return gradient.numel() == 0; });
  const std::vector<detail::TensorGroup> groups = detail::group_tensors(own);
  const at::Tensor own_norm =
      groups.empty()
          ? at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(communicator.device()))
          : total_norm(groups, norm_type);
  return scale(groups, norm_over_ranks(own_norm, norm_type, communicator), max_norm);
}

}  // namespace ddp
