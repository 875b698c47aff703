// SPDX-License-Identifier: Apache-2.0
// Results of evaluations: their sums over batches and ranks, and the best of a run.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>

#include "common/training_task.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/train/checkpoint.hpp"
#include "ddp/train/metrics.hpp"

namespace examples {

struct EvalResult {
  double loss = 0;
  double accuracy = 0;  ///< 0 … 1; NaN: the task has no accuracy
  int64_t num_targets = 0;
};

/// The result as the metrics have it: without an accuracy that the task lacks.
ddp::EpochMetrics epoch_metrics(const EvalResult& result);

/// Sums over the targets of an evaluation. They stay on the device, so no batch makes the host
/// wait.
class EvaluationSums {
 public:
  explicit EvaluationSums(at::Device device);

  /// Zeroes the sums in place.
  void clear() { values_.zero_(); }

  /// Adds a batch, whose loss is a sum. A captured step does this in each replay.
  void add(const BatchResult& batch);

  /// Means over all ranks, equal on all ranks. Collective; the host waits.
  EvalResult reduce(ddp::Communicator& communicator);

  /// float64 [3] on the device: loss, correct answers, targets.
  const at::Tensor& values() const { return values_; }

 private:
  at::Tensor values_;
};

/// The evaluation with the smallest loss so far. Every checkpoint holds it, so a resumed run knows
/// it too.
class BestEvaluation {
 public:
  explicit BestEvaluation(ddp::Checkpointer& checkpointer) : checkpointer_(checkpointer) {}

  /// Call after Checkpointer::restore.
  void restore();
  /// Records an evaluation. Returns true if `loss` is below all earlier ones; never for NaN.
  bool add(int64_t steps_done, double loss);

  int64_t steps_done() const { return steps_done_; }  ///< -1: none yet
  double loss() const { return loss_; }

 private:
  ddp::Checkpointer& checkpointer_;
  int64_t steps_done_ = -1;
  double loss_ = std::numeric_limits<double>::infinity();
};

}  // namespace examples
