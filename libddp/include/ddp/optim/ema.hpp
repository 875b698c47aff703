// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "ddp/core/state_dict.hpp"

namespace ddp {

class DataParallelModel;

struct EmaOptions {
  double decay = 0.999;  ///< share of the average kept at each update
};

/// Exponential moving average of weights: average += (1 - decay) * (weight - average).
/// Averages are float32 for bfloat16 and float16 weights, else of the weight's dtype. Integers
/// (batch counters) are copied. The averages of a model include its buffers (BatchNorm's running
/// statistics), as torchvision's ExponentialMovingAverage: statistics of other weights do not fit.
/// Each rank averages its own buffers. A checkpoint holds rank 0's. To evaluate with rank 0's, call
/// sync_buffers() after swap_in(). save_weights() during swap_in() writes parameters and buffers.
class Ema : public Stateful {
 public:
  /// Starts the averages as copies of `tensors`, or of the model's trained parameters and buffers.
  /// The model outlives the Ema and does not move.
  explicit Ema(const NamedParameters& tensors, const EmaOptions& options = {});
  explicit Ema(const DataParallelModel& model, const EmaOptions& options = {});
  ~Ema() override;

  /// Call after each optimizer step. The host does not wait. The first call must not be captured.
  void update();

  /// Puts the averages into the weights' memory until the returned object is destroyed, which
  /// restores the previous bits. update() throws ddp::Error meanwhile.
  class Swap;
  [[nodiscard]] std::shared_ptr<Swap> swap_in();  ///< see Swap

  const NamedParameters& averages() const;  ///< ordered and named as the constructor's list

  std::string state_name() const override { return "ema"; }
  StateDict state_dict() const override;
  /// A checkpoint without averaged buffers loads too. Their averages then start again at the
  /// model's current buffers, and a line is logged. So name the model before its Ema in a
  /// Checkpointer.
  void load_state_dict(const StateDict& state) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ddp
