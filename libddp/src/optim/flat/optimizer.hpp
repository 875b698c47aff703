// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "core/listeners.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/optim/optimizer.hpp"
#include "optim/flat/math.hpp"
#include "optim/parameter_settings.hpp"
#include "optim/parameter_state.hpp"
#include "optim/update_rule.hpp"
#include "reduce/reducer.hpp"

namespace ddp::detail {

/// Why FlatOptimizer does not support these parameters and settings; empty if it does.
std::string reason_against_flat(const std::vector<ParameterSettings>& parameters,
                                const OptimizerOptions& options);

/// An optimizer whose masters and slots are one memory block each and whose step is one pass over
/// all parameters. The pass reads the gradients in place (in a reducer's buckets or elsewhere, in
/// their own dtype), multiplies them by inverse_scale and clip_factor, updates the float32 weight
/// and writes the half leaf. Gradients are not changed.
///
/// Results and state equal ListOptimizer's: each loads the other's state.
class FlatOptimizer final : public Optimizer {
 public:
  /// `exact_syncs` are those of the parameters' model.
  FlatOptimizer(const std::vector<ParameterSettings>& parameters, const OptimizerOptions& options,
                Listeners* exact_syncs = nullptr);

  using Optimizer::step;
  void step(const StepScalars& scalars) override;
  const NamedParameters& named_parameters() const override { return parameters_; }
  bool supports_found_inf() const override { return true; }
  bool capturable() const override { return true; }
  bool scales_gradients_in_step() const override { return true; }
  /// Two kernels for any number of parameters.
  GradientScan scan_gradients(const StepScalar& inverse_scale, double max_norm) override;
  /// 0-dim float64: the sum of squares of the last scan.
  at::Tensor last_square_sum() const { return sums_.select(0, 0).sum(); }

  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;
  StateDict replicated_state() const override;

 private:
  void prepare_storage();
  void make_storage();
  void make_tables();
  FlatSegment segment_of(size_t index) const;
  void make_chunks();
  void restart_masters();
  void update_moved_leaves();
  void init_states();

  void read_gradients();
  void set_gradient(size_t index, const at::Tensor& grad);
  FlatStep arguments(const StepScalars& scalars);
  FlatScalar scalar(const StepScalar& given, float absent);

  std::unique_ptr<UpdateRule> rule_;
  FlatRule flat_rule_;
  NamedParameters parameters_;
  std::vector<ParameterSettings> settings_;
  std::vector<ParameterState> states_;
  at::Device device_;

  std::vector<at::Tensor> storage_;  // masters, then the slots: float32, one block each
  at::Tensor counts_;                // [parameters] float32, updates made
  at::Tensor biases_;                // [parameters] FlatBias
  at::Tensor squares_;               // [chunks] FlatSquares; LARS, LAMB
  at::Tensor sums_;      // [2, chunks] of a scan: squares, and whether one is inf or NaN
  at::Tensor segments_;  // the tables, as bytes on the device
  at::Tensor chunks_;
  int64_t num_chunks_ = 0;
  std::vector<int32_t> first_chunks_;     // [parameters]
  std::vector<FlatGradients> gradients_;  // of this step

  std::vector<at::Tensor> kept_;  // tensors of a step that its kernels still read
  Listeners::Token on_exact_sync_;
};

}  // namespace ddp::detail
