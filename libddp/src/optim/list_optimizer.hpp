// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "core/listeners.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/optim/optimizer.hpp"
#include "optim/parameter_settings.hpp"
#include "optim/parameter_state.hpp"
#include "optim/update_rule.hpp"

namespace ddp::detail {

/// An optimizer with one state tensor per parameter and slot, updated by one fused call per chunk
/// (group, device, dtype).
class ListOptimizer final : public Optimizer {
 public:
  /// `exact_syncs` are those of the parameters' model.
  ListOptimizer(const std::vector<ParameterSettings>& parameters, const OptimizerOptions& options,
                Listeners* exact_syncs = nullptr);

  using Optimizer::step;
  void step(const StepScalars& scalars) override;
  const NamedParameters& named_parameters() const override { return parameters_; }
  bool supports_found_inf() const override { return true; }
  bool capturable() const override { return true; }
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;
  StateDict replicated_state() const override;

 private:
  struct Chunk {
    double lr_scale;
    double weight_decay;
    bool adapts;
    at::Device device;
    at::ScalarType dtype;  // the rule's compute dtype
    std::vector<ParameterState> members;
    at::Tensor steps;  // [members], float32: updates made
  };

  void add_member(const ParameterSettings& settings);
  void restart_masters();
  void make_state(ParameterState& member) const;
  void step_chunk(Chunk& chunk, const StepScalars& scalars);
  void update(Chunk& chunk, const std::vector<ParameterState*>& active, bool first,
              const StepScalars& scalars);
  void count_steps(Chunk& chunk, UpdateBatch& batch) const;

  std::unique_ptr<UpdateRule> rule_;
  NamedParameters parameters_;
  std::vector<Chunk> chunks_;
  Listeners::Token on_exact_sync_;
};

}  // namespace ddp::detail
