// SPDX-License-Identifier: Apache-2.0
#include "optim/torch_optimizer.hpp"

#include <ATen/Functions.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "core/log/trace_recorder.hpp"
#include "ddp/core/error.hpp"
#include "ddp/detail/trace_scope.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "optim/state_check.hpp"
#include "optim/step_checks.hpp"
#include "optim/torch_optimizer_state.hpp"

namespace ddp {
namespace detail {
namespace {

// The rate that a step's `lr` replaces: that of the first group with one. 0: no group has one.
double base_lr_of(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  const auto base = std::find_if(groups.begin(), groups.end(),
                                 [](const auto& group) { return group.options().get_lr() != 0.0; });
  return base == groups.end() ? 0.0 : base->options().get_lr();
}

// Replaces each gradient by its product with the step's factors, until the object is destroyed.
class ScaledGradients {
 public:
  ScaledGradients(const NamedParameters& parameters, const StepScalars& scalars) {
    std::optional<at::Tensor> factor;
    at::ScalarType dtype = at::kFloat;  // of the gradients that `factor` is for
    for (const NamedParameter& parameter : parameters) {
      const at::Tensor& grad = parameter.tensor.grad();
      if (!grad.defined()) {
        continue;
      }
      if (!factor || factor->device() != grad.device() || dtype != grad.scalar_type()) {
        dtype = grad.scalar_type();
        factor = factor_of(scalars, grad.device(), dtype);
      }
      if (!factor) {
        return;
      }
      replaced_.emplace_back(parameter.tensor, at::mul(grad, *factor));
    }
    swap();  // all products exist, so nothing can throw in between
  }
  ~ScaledGradients() { swap(); }
  ScaledGradients(const ScaledGradients&) = delete;
  ScaledGradients& operator=(const ScaledGradients&) = delete;

 private:
  void swap() {
    for (auto& [parameter, gradient] : replaced_) {
      std::swap(parameter.mutable_grad(), gradient);
    }
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> replaced_;  // parameter, its other gradient
};

}  // namespace

TorchOptimizer::TorchOptimizer(std::shared_ptr<torch::optim::Optimizer> optimizer,
                               const NamedParameters& parameters)
    : optimizer_(std::move(optimizer)) {
  const double base_lr = base_lr_of(optimizer_->param_groups());
  for (const auto& group : optimizer_->param_groups()) {
    lr_ratios_.push_back(base_lr == 0.0 ? 0.0 : group.options().get_lr() / base_lr);
    for (const at::Tensor& tensor : group.params()) {
      const auto is_tensor = [&](const NamedParameter& parameter) {
        return parameter.tensor.is_same(tensor);
      };
      const auto named = std::find_if(parameters.begin(), parameters.end(), is_tensor);
      if (named == parameters.end()) {
        throw SettingsError(concat("wrap_optimizer: a parameter of shape ", tensor.sizes(),
                                   " has no name; pass the names of all its parameters"));
      }
      if (std::any_of(parameters_.begin(), parameters_.end(), is_tensor)) {
        throw SettingsError(concat("wrap_optimizer: the optimizer has parameter ", named->name,
                                   " twice, so a step would move it twice; fix: give it to one "
                                   "group"));
      }
      parameters_.push_back(*named);
    }
  }
}

// add_param_group() or params().push_back() would add parameters without name and ratio.
void TorchOptimizer::check_groups() const {
  size_t count = 0;
  for (const auto& group : optimizer_->param_groups()) {
    count += group.params().size();
  }
  if (optimizer_->param_groups().size() != lr_ratios_.size() || count != parameters_.size()) {
    throw SettingsError(
        "wrap_optimizer: the optimizer's parameter groups changed after it was wrapped; fix: add "
        "groups first, then wrap it");
  }
}

// LibTorch's SGD would train with a sparse momentum, which no checkpoint can copy. Its other rules
// end with an error that names neither parameter nor fix.
void TorchOptimizer::check_sparse_gradients() const {
  for (auto& group : optimizer_->param_groups()) {
    const auto* sgd = dynamic_cast<const torch::optim::SGDOptions*>(&group.options());
    const bool takes_dense_only =
        (sgd != nullptr && (sgd->momentum() != 0 || sgd->weight_decay() != 0)) ||
        dynamic_cast<const torch::optim::AdamOptions*>(&group.options()) != nullptr ||
        dynamic_cast<const torch::optim::AdamWOptions*>(&group.options()) != nullptr ||
        dynamic_cast<const torch::optim::RMSpropOptions*>(&group.options()) != nullptr;
    if (!takes_dense_only) {
      continue;
    }
    for (const auto& tensor : group.params()) {
      if (tensor.grad().defined() && tensor.grad().is_sparse()) {
        throw SettingsError(concat(
            "wrap_optimizer: the gradient of ", name_of(tensor), " is sparse, which of LibTorch's ",
            "optimizers only Adagrad and SGD without momentum and weight decay take; fix: use "
            "ddp::make_sparse_optimizer for it"));
      }
    }
  }
}

std::string TorchOptimizer::name_of(const at::Tensor& tensor) const {
  const auto found = std::find_if(parameters_.begin(), parameters_.end(),
                                  [&](const auto& entry) { return entry.tensor.is_same(tensor); });
  return found != parameters_.end() ? found->name : "a parameter";
}

void TorchOptimizer::set_lr(double lr) {
  const bool any =
      std::any_of(lr_ratios_.begin(), lr_ratios_.end(), [](double r) { return r != 0.0; });
  if (!any) {
    throw SettingsError(
        "Optimizer::step has a learning rate, but every group of the wrapped optimizer was made "
        "with 0, so their ratios are unknown; fix: make the optimizer with the groups' rates, or "
        "call step() to keep them");
  }
  for (size_t i = 0; i < lr_ratios_.size(); ++i) {
    optimizer_->param_groups()[i].options().set_lr(lr * lr_ratios_[i]);
  }
}

void TorchOptimizer::step(const StepScalars& scalars) {
  const TraceScope trace("optimizer", "compute");
  require_means();
  const at::NoGradGuard no_grad;
  check_groups();
  check_sparse_gradients();
  if (scalars.found_inf.defined() && host_value(scalars.found_inf) != 0.0) {
    return;
  }
  if (scalars.lr.defined()) {
    set_lr(host_value(scalars.lr));
  }
  const ScaledGradients scaled(parameters_, scalars);
  optimizer_->step();
  bump_versions(parameters_);  // LibTorch's optimizers write .data(), those of Python do not
}

void TorchOptimizer::require_savable() const {
  torch_optimizer_type(*optimizer_);
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
        dict.tensors[{parameter.name, slot}] = value.tensor;
      }
    }
  }
  return dict;
}

// Classes whose state cannot be saved are compared by their parameters alone.
StateDict TorchOptimizer::replicated_state() const {
  try {
    return state_dict();
  } catch (const SettingsError&) {
    return {};
  }
}

void TorchOptimizer::load_state_dict(const StateDict& dict) {
  const at::NoGradGuard no_grad;
  StateCheck check(dict, state_name());
  check.value("type", StateValue(torch_optimizer_type(*optimizer_)));
  const auto slots = read_torch_state(*make_torch_state(*optimizer_));
  std::map<void*, std::unique_ptr<torch::optim::OptimizerParamState>> loaded;
  for (const NamedParameter& parameter : parameters_) {
    std::map<StateKey, at::Tensor> required;
    std::map<std::string, at::Tensor> found;
    for (const auto& [slot, value] : slots) {
      const StateKey key(parameter.name, slot);
      const at::Tensor like = slot == "step" ? value.tensor : parameter.tensor;
      if (value.required) {
        required[key] = like;
      } else {
        check.all_or_none({{key, like}});
      }
      if (dict.contains(key)) {
        const at::Tensor saved = dict.whole(key);
        found[slot] = slot == "step" ? saved
                                     : saved.to(parameter.tensor.options(),
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
