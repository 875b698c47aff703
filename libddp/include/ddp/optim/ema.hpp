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
/// (batch counters) are copied. Buffers in the list are averaged too (AveragedModel's use_buffers).
/// Otherwise the averages and their checkpoint hold no buffers: save_weights() during swap_in()
/// writes the averages with the module's current buffers (BatchNorm's statistics) as one file.
class Ema : public Stateful {
 public:
  /// Starts the averages as copies of `tensors`, or of the model's trained parameters.
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
  void load_state_dict(const StateDict& state) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ddp
