// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

#include "ddp/optim/optimizer.hpp"

namespace ddp {

/// Adapts a torch::optim::Optimizer, for GradScaler and Checkpointer. Not capturable. GradScaler
/// reads found_inf on the host before each step. make_optimizer's optimizers are faster.
///
/// A step with `lr` sets every parameter group's learning rate to lr, times the ratio of the
/// group's learning rate to the first group's at construction. A step without lr leaves the groups
/// unchanged. inverse_scale and clip_factor are applied to the gradients first.
///
/// State of SGD, Adam, AdamW, RMSprop and Adagrad uses PyTorch's slot names. state_dict() of other
/// optimizers throws SettingsError.
class TorchOptimizer final : public Optimizer {
 public:
  /// `parameters` names the optimizer's parameters (a model's list; others in the list are
  /// ignored). Throws SettingsError if a parameter of the optimizer is not in the list.
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
