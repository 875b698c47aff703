// SPDX-License-Identifier: Apache-2.0
// What the training loop needs to know about a kind of data: its batches, their forward and loss.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <functional>

#include "ddp/core/visit_tensors.hpp"

namespace examples {

/// A task's batch is a plain struct. Its for_each_tensor visits everything that forward reads,
/// because a captured step replaces the tensors by its own memory.
template <class T>
concept TrainingBatch = requires(T& batch, const ddp::TensorVisitor& visit) {
  for_each_tensor(batch, visit);
  { batch.num_targets() } -> std::convertible_to<int64_t>;  // targets in the loss
  { batch.num_samples() } -> std::convertible_to<int64_t>;  // samples for the throughput
};

/// A number of targets: the sum of a number that the host knows and one on the device. Batches of
/// equal shapes with different counts need the latter in a captured step.
struct TargetCount {
  int64_t on_host = 0;
  at::Tensor on_device = {};  ///< float32, one element; undefined: 0

  void operator+=(const TargetCount& other) {
    on_host += other.on_host;
    if (other.on_device.defined()) {
      on_device = on_device.defined() ? on_device.add(other.on_device) : other.on_device;
    }
  }
  /// `sum` divided by the count, or by 1 if there are no targets.
  at::Tensor mean_of(const at::Tensor& sum) const {
    return on_device.defined() ? sum.div(on_device.add(on_host).clamp_min(1))
                               : sum.div(static_cast<double>(std::max<int64_t>(1, on_host)));
  }
};

/// Result of one batch on this rank.
struct BatchResult {
  at::Tensor loss;  ///< 0-dim, for the backward: a sum or a mean, see TrainingTask::loss_is_sum;
                    ///< the sum in an evaluation
  at::Tensor num_correct{};   ///< 0-dim: correct targets; undefined: no accuracy
  TargetCount num_targets{};  ///< used with sums
};

template <TrainingBatch Batch>
class TrainingTask {
 public:
  virtual ~TrainingTask() = default;

  /// Training batches per epoch, equal on all ranks.
  virtual int64_t num_batches() const = 0;

  /// True: `loss` is the sum over the batch's targets. A step then follows the gradient of the mean
  /// over all targets of all its batches and ranks, however many each had. False: `loss` is the
  /// mean over the batch's targets. A step follows the mean over the targets of a rank's batches,
  /// then over ranks, which is the same if ranks have equally many. num_targets() then depends only
  /// on what the batch's for_each_tensor visits.
  virtual bool loss_is_sum() const = 0;

  /// For sums: the factor of each target's loss in the backward, equal on all ranks. It is a power
  /// of two near 1 / (targets of a rank's step). The step's mean is unchanged to the bit, and
  /// gradients stay in the range of float16, which those of a sum would leave.
  virtual double target_weight() const { return 1; }

  /// Loads the next training batch. `draw` numbers the batches of the whole run. All randomness of
  /// a batch depends on `draw`, so a resumed run draws the same.
  virtual Batch load(int64_t draw) = 0;
  /// Runs the wrapped model's forward on a batch of load(), in the caller's autocast. It may depend
  /// only on what the batch's for_each_tensor visits: a captured step is replayed on other batches.
  virtual BatchResult forward(const Batch& batch) = 0;

  /// Calls `evaluate` with the batches of this rank's part of the evaluation set, until it returns
  /// false. Each target of the set is on exactly one rank.
  virtual void for_each_evaluation_batch(const std::function<bool(Batch batch)>& evaluate) = 0;
  /// Runs the forward on such a batch. Returns sums.
  virtual BatchResult evaluate(const Batch& batch) = 0;
};

}  // namespace examples
