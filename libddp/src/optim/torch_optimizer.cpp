// SPDX-License-Identifier: Apache-2.0
#include "optim/torch_optimizer.hpp"

#include <ATen/Functions.h>

#include <algorithm>
#include <map>

#include "core/trace_recorder.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/trace_scope.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "optim/state_check.hpp"
#include "optim/torch_optimizer_state.hpp"

namespace ddp {
namespace detail {
namespace {

double relative_lr(double lr, double first_lr) {
  return first_lr == 0.0 ? 1.0 : lr / first_lr;
}

double host_value(const StepScalar& scalar) {
  return scalar.value() ? *scalar.value() : scalar.tensor(at::kCPU).item<double>();
}

void multiply_gradients(const std::vector<at::Tensor>& gradients, const StepScalar& factor) {
  if (!factor.defined()) {
    return;
  }
  for (const at::Tensor& gradient : gradients) {
    gradient.mul_(factor.tensor(gradient.device()));
  }
}

}  // namespace

TorchOptimizer::TorchOptimizer(std::shared_ptr<torch::optim::Optimizer> optimizer,
                               const NamedParameters& parameters)
    : optimizer_(std::move(optimizer)) {
  for (auto& group : optimizer_->param_groups()) {
    lr_ratios_.push_back(relative_lr(group.options().get_lr(),
                                     optimizer_->param_groups().front().options().get_lr()));
    for (const at::Tensor& tensor : group.params()) {
      const auto named = std::find_if(
          parameters.begin(), parameters.end(),
          [&](const NamedParameter& parameter) { return parameter.tensor.is_same(tensor); });
      if (named == parameters.end()) {
        throw SettingsError(concat("wrap_optimizer: a parameter of shape ", tensor.sizes(),
                                   " has no name; pass the names of all its parameters"));
      }
      parameters_.push_back(*named);
    }
  }
}

void TorchOptimizer::step(const StepScalars& scalars) {
  const TraceScope trace("optimizer", "compute");
  const at::NoGradGuard no_grad;
  if (scalars.found_inf.defined() && host_value(scalars.found_inf) != 0.0) {
    return;
  }
  multiply_gradients(gradients(), scalars.inverse_scale);
  multiply_gradients(gradients(), scalars.clip_factor);
  if (scalars.lr.defined()) {
    const double lr = host_value(scalars.lr);
    for (size_t i = 0; i < lr_ratios_.size(); ++i) {
      optimizer_->param_groups()[i].options().set_lr(lr * lr_ratios_[i]);
    }
  }
  optimizer_->step();
}

StateDict TorchOptimizer::state_dict() const {
  StateDict dict;
  dict.values["type"] = torch_optimizer_type(*optimizer_);
  const auto& states = optimizer_->state();
  for (const NamedParameter& parameter : parameters_) {
    const auto state = states.find(parameter.tensor.unsafeGetTensorImpl());
    if (state == states.end()) {
      continue;
    }
    for (const auto& [slot, value] : read_torch_state(*state->second)) {
      if (value.tensor.defined()) {
        dict.tensors["state." + parameter.name + "." + slot] = value.tensor;
      }
    }
  }
  return dict;
}

void TorchOptimizer::load_state_dict(const StateDict& dict) {
  const at::NoGradGuard no_grad;
  StateCheck check(dict, state_name());
  check.value("type", StateValue(torch_optimizer_type(*optimizer_)));
  const auto slots = read_torch_state(*make_torch_state(*optimizer_));
  std::map<void*, std::unique_ptr<torch::optim::OptimizerParamState>> loaded;
  for (const NamedParameter& parameter : parameters_) {
    const std::string prefix = "state." + parameter.name + ".";
    std::map<std::string, at::Tensor> required;
    std::map<std::string, at::Tensor> found;
    for (const auto& [slot, value] : slots) {
      const at::Tensor like = slot == "step" ? value.tensor : parameter.tensor;
      if (value.required) {
        required[prefix + slot] = like;
      } else {
        check.all_or_none({{prefix + slot, like}});
      }
      const auto entry = dict.tensors.find(prefix + slot);
      if (entry != dict.tensors.end()) {
        found[slot] = slot == "step" ? entry->second
                                     : entry->second.to(parameter.tensor.options(),
                                                        /*non_blocking=*/false, /*copy=*/true);
      }
    }
    const bool has_required = check.all_or_none(required);
    if (!found.empty() && (has_required || required.empty())) {
      auto& state = loaded[parameter.tensor.unsafeGetTensorImpl()];
      state = make_torch_state(*optimizer_);
      write_torch_state(*state, found);
    }
  }
  check.nothing_else();
  optimizer_->state().clear();
  for (auto& [parameter, state] : loaded) {
    optimizer_->state()[parameter] = std::move(state);
  }
}

}  // namespace detail

std::unique_ptr<Optimizer> wrap_optimizer(std::shared_ptr<torch::optim::Optimizer> optimizer,
                                          const NamedParameters& parameters) {
  return std::make_unique<detail::TorchOptimizer>(std::move(optimizer), parameters);
}

}  // namespace ddp
