// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

#include "ddp/optim/optimizer.hpp"

namespace ddp::detail {

/// See wrap_optimizer().
class TorchOptimizer final : public Optimizer {
 public:
  TorchOptimizer(std::shared_ptr<torch::optim::Optimizer> optimizer,
                 const NamedParameters& parameters);

  using Optimizer::step;
  void step(const StepScalars& scalars) override;
  const NamedParameters& named_parameters() const override { return parameters_; }
  bool supports_found_inf() const override { return false; }
  bool capturable() const override { return false; }
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;
  StateDict replicated_state() const override;
  /// Throws SettingsError if state_dict() would.
  void require_savable() const;

 private:
  void check_groups() const;
  void check_sparse_gradients() const;
  std::string name_of(const at::Tensor& tensor) const;
  void set_lr(double lr);

  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  NamedParameters parameters_;
  std::vector<double> lr_ratios_;  // [groups], to the first rate that is not 0
};

}  // namespace ddp::detail
