// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "core/listeners.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/optim/optimizer.hpp"
#include "ddp/reduce/data_parallel_model.hpp"
#include "optim/flat/optimizer.hpp"
#include "optim/parameter_settings.hpp"
#include "optim/parameter_state.hpp"
#include "optim/update_rule.hpp"
#include "optim/zero/sharded_gradients.hpp"
#include "optim/zero/shards.hpp"
#include "reduce/reducer.hpp"

namespace ddp::detail {

/// Why ZeroOptimizer does not support these parameters and settings; empty if it does.
std::string reason_against_zero(const std::vector<ParameterSettings>& parameters,
                                const OptimizerOptions& options);

/// ZeRO-1. Buckets are reduce-scattered. Each rank keeps masters and slots only of its part of
/// every bucket, and updates that part with a FlatOptimizer over its pieces of parameters. Then the
/// parts are all-gathered:
///
///   backward            | reduce-scatter b0, b1, …          bucket = [ rank 0 | rank 1 | … ]
///   step                | update own pieces
///                       | copy them into the bucket, all-gather, copy the bucket into the leaves
///
/// The bucket's memory holds gradients and then weights, so sending needs no extra memory, and
/// gradients are undefined after a step. Each rank saves its parts of FlatOptimizer's state.
class ZeroOptimizer final : public Optimizer, public ShardedGradients {
 public:
  /// `parameters` are the model's, in the model's order.
  ZeroOptimizer(DataParallelModel& model, const std::vector<ParameterSettings>& parameters,
                const OptimizerOptions& options);

  using Optimizer::step;
  void step(const StepScalars& scalars) override;
  const NamedParameters& named_parameters() const override { return parameters_; }
  /// This rank's parts of the gradients.
  std::vector<at::Tensor> gradients() const override;
  GradientScan scan_gradients(const StepScalar& inverse_scale, double max_norm) override;
  void agree_on_found_inf(at::Tensor& found_inf) override;
  bool scales_gradients_in_step() const override { return true; }
  bool supports_found_inf() const override { return true; }
  bool capturable() const override { return true; }

  /// Over this rank's pieces of parameters; nullptr without pieces.
  const FlatOptimizer* own() const { return own_.get(); }
  /// This rank's parts.
  StateDict state_dict() const override;
  /// The state may be whole, or have parts of any division that cover this rank's.
  void load_state_dict(const StateDict& state) override;
  StateDict replicated_state() const override { return {}; }  ///< each part has one owner

 private:
  void assign_shards();
  void reassign_shards();
  std::vector<size_t> moved_parameters(bool refuses) const;
  void update_moved_leaves();
  void update_views(const std::vector<size_t>& moved) const;
  void clear_gradients();
  bool read_gradients();
  void send_weights();
  void copy_weights_to_bucket(const ZeroBucket& bucket) const;
  WorkPtr gather_weights(const ZeroBucket& bucket) const;
  void copy_weights_from_bucket(const ZeroBucket& bucket, const WorkPtr& work) const;
  StateDict own_part(const StateDict& state) const;
  std::vector<std::string> slots_of(const ZeroBucket& bucket) const;
  at::Tensor gather_counts(const StateDict& own) const;
  void gather_bucket(const ZeroBucket& bucket, const StateDict& before, const at::Tensor& counts,
                     StateDict& now) const;

  NamedParameters parameters_;
  std::vector<ParameterSettings> settings_;
  OptimizerOptions options_;
  std::unique_ptr<UpdateRule> rule_;
  Reducer& reducer_;
  CommunicatorPtr communicator_;
  at::Device device_;

  std::vector<ZeroBucket> buckets_;
  std::unique_ptr<FlatOptimizer> own_;     // nullptr: this rank's parts contain no piece
  at::Tensor piece_parameters_;            // int32 [pieces of own_], index of the parameter
  std::vector<ParameterMemory> memories_;  // of parameters_, as the buckets' views use them

  Listeners::Token on_new_layout_;
};

}  // namespace ddp::detail
