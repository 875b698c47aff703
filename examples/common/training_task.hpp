// SPDX-License-Identifier: Apache-2.0
// What the training loop leaves to the kind of data: what a batch is, its forward and its loss.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/core/visit_tensors.hpp"

namespace examples {

/// Sums over the targets of an evaluation, kept on the device: no batch makes the host wait.
class EvaluationSums {
 public:
  explicit EvaluationSums(at::Device device);

  /// Back to nothing, in the same memory.
  void clear() { values_.zero_(); }

  /// A batch: its loss summed over its targets, how many of them were right, how many there are.
  void add(const at::Tensor& loss_sum, const at::Tensor& num_correct, int64_t num_targets);
  /// The same with the device's count (one element): a captured step counts anew in each replay.
  void add(const at::Tensor& loss_sum, const at::Tensor& num_correct,
           const at::Tensor& num_targets);

  /// float64 [3] on the device: loss, right answers, targets.
  const at::Tensor& values() const { return values_; }

 private:
  at::Tensor values_;
};

/// A batch as the task that loaded it understands it.
struct TrainingBatch {
  std::shared_ptr<void> object;  ///< the task's own
  /// Those inside `object` that forward reads. A captured step puts its own memory in their place;
  /// a few float32 on the CPU are numbers that differ from step to step.
  std::vector<at::Tensor*> tensors;
  int64_t num_targets = 0;  ///< what the loss is over
  int64_t num_samples = 0;  ///< what the throughput counts
  /// num_targets as a float32 of one element, one of `tensors`, where batches of the same shapes
  /// have different numbers of them. Null: the shapes tell.
  const at::Tensor* target_count = nullptr;
  std::vector<int64_t> host_numbers = {};  ///< others that forward reads and no shape tells
};
inline void for_each_tensor(TrainingBatch& batch, const ddp::TensorVisitor& visit) {
  for (at::Tensor* tensor : batch.tensors) {
    visit(*tensor);
  }
  for (const int64_t number : batch.host_numbers) {
    visit(number);
  }
}

/// What a micro-batch gave this rank.
struct MicroBatchResult {
  at::Tensor loss;  ///< 0-dim, to be differentiated: TrainingTask::loss_is_sum says of what (in an
                    ///< evaluation: the sum)
  at::Tensor num_correct;  ///< 0-dim: of the targets
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
  virtual TrainingBatch load(int64_t draw) = 0;
  /// The wrapped model's forward on a batch of load(), in the caller's autocast. It depends on the
  /// batch's tensors, their shapes and host_numbers alone: a captured step is replayed on others.
  virtual MicroBatchResult forward(const TrainingBatch& batch) = 0;

  /// Calls `evaluate` with the batches of this rank's part of the whole evaluation set. Each target
  /// of the set is on one rank.
  virtual void for_each_evaluation_batch(
      const std::function<void(TrainingBatch batch)>& evaluate) = 0;
  /// The forward on such a batch; sums.
  virtual MicroBatchResult evaluate(const TrainingBatch& batch) = 0;
};

}  // namespace examples
