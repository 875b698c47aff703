// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ddp/optim/optimizer.hpp"
#include "ddp/optim/optimizer_options.hpp"
#include "optim/update_rule.hpp"

namespace ddp::detail {

/// An optimizer whose state is one tensor a parameter and slot, updated by one fused call for each
/// chunk (group, device, dtype).
class ListOptimizer final : public Optimizer {
 public:
  ListOptimizer(const NamedParameters& parameters, const OptimizerOptions& options);

  using Optimizer::step;
  void step(const StepScalars& scalars) override;
  const NamedParameters& named_parameters() const override { return parameters_; }
  bool supports_found_inf() const override { return true; }
  bool capturable() const override { return true; }
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 private:
  struct Member {
    std::string name;
    at::Tensor leaf;
    at::Tensor updated;             // what the rule updates: the leaf or its master
    std::vector<at::Tensor> slots;  // in the rule's order
    at::Tensor step;                // 0-dim view of its chunk's counts
    bool needs_master = false;
    bool has_state = false;
  };
  struct Chunk {
    double lr_scale;
    double weight_decay;
    at::Device device;
    at::ScalarType dtype;  // the rule computes in it
    std::vector<Member> members;
    at::Tensor steps;  // [members], float32: updates made
  };

  void add_member(const NamedParameter& parameter, double lr_scale, double weight_decay);
  void make_state(Member& member) const;
  void step_chunk(Chunk& chunk, const StepScalars& scalars);
  void update(Chunk& chunk, const std::vector<Member*>& active, bool first,
              const StepScalars& scalars);
  void count_steps(Chunk& chunk, UpdateBatch& batch) const;
  std::map<std::string, at::Tensor> tensors_of(const Member& member) const;

  std::unique_ptr<UpdateRule> rule_;
  NamedParameters parameters_;
  std::vector<Chunk> chunks_;
};

}  // namespace ddp::detail
