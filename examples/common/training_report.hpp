// SPDX-License-Identifier: Apache-2.0
// What a training run reports: its summary, the hash of its parameters, and gradients with inf or
// NaN.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "common/evaluation.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/core/state_dict.hpp"
#include "ddp/optim/optimizer.hpp"
#include "ddp/train/metrics.hpp"

namespace examples {

struct TrainingSummary {
  int64_t first_step = 0;                       ///< > 0: the run resumed at this step
  int64_t num_steps = 0;                        ///< optimizer steps in total; 0: nothing trains
  std::optional<ddp::EpochResult> first_epoch;  ///< of this run
  ddp::EpochResult last_epoch;
  std::optional<EvalResult> test_before;  ///< result of train.eval_first
  EvalResult test;                        ///< num_targets is 0 if nothing was evaluated

  void add_epoch(const ddp::EpochResult& epoch);
  /// Over all ranks, training only, without the first step; 0 if nothing was timed.
  double samples_per_second() const;
  /// The lines "resumed" and "train loss", as far as they apply.
  std::string first_lines() const;

 private:
  double timed_seconds_ = 0;
  double timed_samples_ = 0;
};

/// Text by printf's rules.
[[gnu::format(printf, 1, 2)]] std::string format(const char* pattern, ...);

/// 16 hexadecimal digits over names, dtypes, shapes and every bit of the values: equal hashes mean
/// equal tensors. The host waits for the device.
std::string parameter_hash(const ddp::NamedParameters& parameters);

/// Returns this rank's hash if all ranks agree; throws MismatchError naming the first rank that
/// differs. Collective.
std::string common_parameter_hash(const ddp::NamedParameters& parameters,
                                  ddp::ControlPlane& control_plane);

/// Logs the gradients with inf or NaN that an optimizer's scans have found.
class NonFiniteLog {
 public:
  /// `scales_loss`: such gradients are normal, because the loss scale is lowered then. `optimizer`
  /// outlives this object.
  NonFiniteLog(const ddp::Optimizer& optimizer, const ddp::TrainOptions& train, bool scales_loss);

  /// Reports the scans since the last call. For steps after which the host waits anyway.
  void report(int64_t steps_done);

 private:
  const ddp::Optimizer& optimizer_;
  bool scales_loss_;
  std::string consequence_;  ///< what such gradients did, and how to avoid them
  int64_t num_reported_ = 0;
};

}  // namespace examples
