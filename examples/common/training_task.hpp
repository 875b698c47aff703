// SPDX-License-Identifier: Apache-2.0
// What the training loop leaves to the kind of data: what a batch is, its forward and its loss.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace examples {

/// Sums over the targets of an evaluation, kept on the device: no batch makes the host wait.
class EvaluationSums {
 public:
  explicit EvaluationSums(at::Device device);

  /// A batch: its loss summed over its targets, how many of them were right, how many there are.
  void add(const at::Tensor& loss_sum, const at::Tensor& num_correct, int64_t num_targets);

  /// float64 [3] on the device: loss, right answers, targets.
  const at::Tensor& values() const { return values_; }

 private:
  at::Tensor values_;
};

/// What a micro-batch gave this rank.
struct MicroBatchResult {
  at::Tensor loss;          ///< 0-dim, to be differentiated: TrainingTask::loss_is_sum says of what
  at::Tensor num_correct;   ///< 0-dim: of the targets
  int64_t num_targets = 0;  ///< what the loss is over
  int64_t num_samples = 0;  ///< what the throughput counts
};

class TrainingTask {
 public:
  virtual ~TrainingTask() = default;

  /// Training batches an epoch, as many on every rank.
  virtual int64_t num_batches() const = 0;

  /// True: `loss` is the sum over the micro-batch's targets, and a step follows the gradient of the
  /// mean over all targets of all its micro-batches and ranks, however many each had. False: `loss`
  /// is a mean, and a step follows the mean over micro-batches and ranks.
  virtual bool loss_is_sum() const = 0;

  /// Sums: what the backward multiplies each target's loss with, the same on all ranks, a power of
  /// two near 1 / (targets of a rank's step). The step's mean stays what it is, to the bit, and
  /// gradients stay as small as those of a mean: a sum's leave the range of float16.
  virtual double target_weight() const { return 1; }

  /// Takes the next training batch. `draw` numbers micro-batches through the whole run: what is
  /// random about a batch depends on it, so that a resumed run draws the same.
  virtual void load(int64_t draw) = 0;
  /// The wrapped model's forward on that batch, in the caller's autocast. Lets the batch go.
  virtual MicroBatchResult forward() = 0;

  /// Adds this rank's part of the whole evaluation set. Each target of the set is on one rank.
  virtual void evaluate(EvaluationSums& sums) = 0;
};

}  // namespace examples
