// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/optim/optimizer.hpp"
#include "ddp/optim/optimizer_options.hpp"
#include "ddp/reduce/reducer.hpp"
#include "optim/flat_math.hpp"
#include "optim/parameter_settings.hpp"
#include "optim/parameter_state.hpp"
#include "optim/update_rule.hpp"

namespace ddp::detail {

/// Why a FlatOptimizer cannot take these parameters and settings; empty where it can.
std::string reason_against_flat(const std::vector<ParameterSettings>& parameters,
                                const OptimizerOptions& options);

/// Of Optimizer::begin_step: throws SettingsError without a learning rate, and with what is known
/// only after backward.
void check_begin_step(const StepScalars& scalars);
/// Of Optimizer::step after a backward that updated parameters.
void check_end_of_begun_step(const StepScalars& scalars);

/// An optimizer whose masters and slots lie in one piece of memory each and whose step is one pass
/// over all parameters: it reads the gradients where they lie (in a reducer's buckets or elsewhere,
/// in their own dtype), multiplies them by inverse_scale and clip_factor on the way, updates the
/// float32 weight and writes the half leaf. Gradients are not changed.
///
/// What it computes is ListOptimizer's, and so is its state: either goes on from the other's.
class FlatOptimizer final : public Optimizer {
 public:
  FlatOptimizer(const std::vector<ParameterSettings>& parameters, const OptimizerOptions& options);

  using Optimizer::step;
  void step(const StepScalars& scalars) override;
  void begin_step(const StepScalars& scalars) override;
  const NamedParameters& named_parameters() const override { return parameters_; }
  bool supports_found_inf() const override { return true; }
  bool capturable() const override { return true; }
  bool scales_gradients_in_step() const override { return true; }
  /// Two kernels, however many parameters there are.
  GradientScan scan_gradients(const StepScalar& inverse_scale, double max_norm) override;

  /// Updates the buckets it is told of after begin_step(); does nothing once this is gone.
  Reducer::BucketListener bucket_listener();
  /// Where it does; absent on the CPU, and before the first such update.
  const std::optional<c10::Stream>& update_stream() const { return side_; }
  /// Whether buckets will be updated: begin_step() was called and every parameter has state.
  bool has_begun() const { return begun_.has_value(); }
  /// Ends what begin_step() began without an update of the rest: the current stream waits for the
  /// parameters that were updated. Returns their number.
  int64_t end_begun_step();
  /// Updates the buckets that `reducer` tells it of after begin_step(), as long as this lives.
  void listen_to(Reducer& reducer);

  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 private:
  // A bucket's parameters as a table of their own.
  struct BucketTable {
    std::vector<size_t> parameters;
    at::Tensor chunks;
    FlatGradients gradients;
  };
  void update_bucket(const GradBucket& bucket, const WorkPtr& work);
  BucketTable& table_of(const GradBucket& bucket);
  size_t index_of(const at::Tensor& leaf) const;
  int64_t num_updated() const;
  void wait_for_updates() const;
  void join_begun_step(const StepScalars& scalars);

  void prepare_storage();
  void make_storage();
  void make_tables();
  FlatSegment segment_of(size_t index) const;
  void cut_chunks();
  void watch_leaf(size_t index);
  void follow_leaves();
  void check_leaf(const ParameterState& state) const;
  void begin_states();

  void read_gradients();
  void set_gradient(size_t index, const at::Tensor& grad);
  static void put_gradient(FlatGradients& run, size_t local, const at::Tensor& grad);
  FlatStep arguments(const StepScalars& scalars);
  FlatScalar scalar(const StepScalar& given, float absent);

  std::unique_ptr<UpdateRule> rule_;
  FlatRule flat_rule_;
  NamedParameters parameters_;
  std::vector<ParameterSettings> settings_;
  std::vector<ParameterState> states_;
  at::Device device_;

  std::vector<at::Tensor> storage_;  // masters, then the slots: float32, one piece each
  at::Tensor counts_;                // [parameters] float32, updates made
  at::Tensor biases_;                // [parameters] FlatBias
  at::Tensor squares_;               // [chunks] FlatSquares; LARS, LAMB
  at::Tensor sums_;                  // [2, chunks] of a scan: squares, and whether one is bad
  at::Tensor segments_;              // the tables, as bytes on the device
  at::Tensor chunks_;
  int64_t num_chunks_ = 0;
  std::vector<int32_t> first_chunks_;     // [parameters]
  std::vector<FlatGradients> gradients_;  // of this step

  std::optional<FlatStep> begun_;  // between begin_step and step: what buckets are updated with
  std::vector<at::Tensor> begun_kept_;
  std::vector<bool> updated_;  // [parameters] since begin_step
  bool begun_in_capture_ = false;
  std::vector<BucketTable> bucket_tables_;
  std::optional<c10::Stream> side_;  // where buckets are updated; CUDA
  bool updates_buckets_ = false;
  const std::shared_ptr<int> lifetime_ = std::make_shared<int>();

  std::vector<at::Tensor> kept_;  // what a step made and its kernels still read
};

}  // namespace ddp::detail
