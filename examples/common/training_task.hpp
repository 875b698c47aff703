// SPDX-License-Identifier: Apache-2.0
// Interface between the training loop and a kind of data: its batches, forward and loss.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/core/visit_tensors.hpp"

namespace examples {

/// Sums over the targets of an evaluation. They stay on the device, so no batch makes the host
/// wait.
class EvaluationSums {
 public:
  explicit EvaluationSums(at::Device device);

  /// Zeroes the sums in place.
  void clear() { values_.zero_(); }

  /// Adds a batch: the sum of its losses, its correct answers and its number of targets.
  void add(const at::Tensor& loss_sum, const at::Tensor& num_correct, int64_t num_targets);
  /// The same with a count of one element on the device, which a captured step reads in each
  /// replay.
  void add(const at::Tensor& loss_sum, const at::Tensor& num_correct,
           const at::Tensor& num_targets);

  /// float64 [3] on the device: loss, correct answers, targets.
  const at::Tensor& values() const { return values_; }

 private:
  at::Tensor values_;
};

/// A batch of the task that loaded it.
struct TrainingBatch {
  std::shared_ptr<void> object;  ///< owned by the task
  /// Tensors inside `object` that forward reads. A captured step replaces them by its own memory. A
  /// few float32 on the CPU are numbers that change per step.
  std::vector<at::Tensor*> tensors;
  int64_t num_targets = 0;  ///< number of targets in the loss
  int64_t num_samples = 0;  ///< number of samples for the throughput
  /// num_targets as a float32 of one element, one of `tensors`, if batches of equal shapes can have
  /// different numbers of targets. Null: the shapes determine it.
  const at::Tensor* target_count = nullptr;
  std::vector<int64_t> host_numbers = {};  ///< other numbers that forward reads
};
inline void for_each_tensor(TrainingBatch& batch, const ddp::TensorVisitor& visit) {
  for (at::Tensor* tensor : batch.tensors) {
    visit(*tensor);
  }
  for (const int64_t number : batch.host_numbers) {
    visit(number);
  }
}

/// Result of a micro-batch on this rank.
struct MicroBatchResult {
  at::Tensor loss;  ///< 0-dim, for the backward: a sum or mean, see TrainingTask::loss_is_sum (in
                    ///< an evaluation: the sum)
  at::Tensor num_correct;  ///< 0-dim: correct targets
};

class TrainingTask {
 public:
  virtual ~TrainingTask() = default;

  /// Training batches per epoch, equal on all ranks.
  virtual int64_t num_batches() const = 0;

  /// True: `loss` is the sum over the micro-batch's targets. A step then follows the gradient of
  /// the mean over all targets of all its micro-batches and ranks, however many each had. False:
  /// `loss` is a mean, and a step follows the mean over micro-batches and ranks.
  virtual bool loss_is_sum() const = 0;

  /// For sums: the factor of each target's loss in the backward, equal on all ranks, a power of two
  /// near 1 / (targets of a rank's step). The step's mean is unchanged to the bit, and gradients
  /// stay in the range of float16, which those of a sum would leave.
  virtual double target_weight() const { return 1; }

  /// Loads the next training batch. `draw` numbers micro-batches through the whole run. All
  /// randomness of a batch depends on `draw`, so a resumed run draws the same.
  virtual TrainingBatch load(int64_t draw) = 0;
  /// Runs the wrapped model's forward on a batch of load(), in the caller's autocast. It may depend
  /// only on the batch's tensors, their shapes and host_numbers: a captured step is replayed on
  /// other batches.
  virtual MicroBatchResult forward(const TrainingBatch& batch) = 0;

  /// Calls `evaluate` with the batches of this rank's part of the evaluation set. Each target of
  /// the set is on exactly one rank.
  virtual void for_each_evaluation_batch(
      const std::function<void(TrainingBatch batch)>& evaluate) = 0;
  /// Runs the forward on such a batch; returns sums.
  virtual MicroBatchResult evaluate(const TrainingBatch& batch) = 0;
};

}  // namespace examples
