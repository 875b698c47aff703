// SPDX-License-Identifier: Apache-2.0
// torch::optim's optimizers behind ddp::Optimizer, so that GradScaler and Checkpointer take them.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

#include "ddp/optim/optimizer.hpp"

namespace ddp {

/// Adapts a torch::optim::Optimizer. Not capturable; GradScaler reads found_inf on the host before
/// its steps, as PyTorch does. Steps its parameters one by one: make_optimizer's are faster.
///
/// A step with `lr` sets it on every parameter group, times the ratio of the group's learning rate
/// to the first group's at construction; a step without lr leaves the groups alone. inverse_scale
/// and clip_factor are applied to the gradients first.
///
/// State of SGD, Adam, AdamW, RMSprop and Adagrad is kept under PyTorch's slot names; state_dict of
/// others throws SettingsError.
class TorchOptimizer final : public Optimizer {
 public:
  /// `parameters` names the optimizer's parameters (a model's list; parameters the optimizer does
  /// not hold are ignored). Throws SettingsError for a parameter of the optimizer that has no name
  /// there.
  TorchOptimizer(std::shared_ptr<torch::optim::Optimizer> optimizer,
                 const NamedParameters& parameters);

  using Optimizer::step;
  void step(const StepScalars& scalars) override;
  const NamedParameters& named_parameters() const override { return parameters_; }
  bool supports_found_inf() const override { return false; }
  bool capturable() const override { return false; }
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 private:
  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  NamedParameters parameters_;
  std::vector<double> lr_ratios_;  // [groups]
};

}  // namespace ddp
