// SPDX-License-Identifier: Apache-2.0
// Supervised training on rows of tensors.
#pragma once

#include <cstdint>
#include <functional>

#include "common/training_task.hpp"
#include "ddp/data/data_loader.hpp"
#include "tensors/tensor_files.hpp"

namespace examples {

struct TensorBatch {
  TensorRows rows = {};
  /// rows.num_targets as a float32 of one element, if some targets are ignored: batches of equal
  /// shapes then have different counts, which a captured step gets on the device.
  at::Tensor target_count = {};

  int64_t num_samples() const { return rows.tensors.front().size(0); }
  int64_t num_targets() const { return rows.num_targets; }
};
inline void for_each_tensor(TensorBatch& batch, const ddp::TensorVisitor& visit) {
  for_each_tensor(batch.rows, visit);
  visit(batch.target_count);
}

using TensorLoader = ddp::DataLoader<TensorRowsDataset>;

/// Objects that the task uses; all outlive the task.
struct TensorParts {
  /// The wrapper's forward on a batch, and its mean loss: see sample_loss.
  std::function<ddp::ops::CrossEntropyResult(const TensorRows&, bool is_training)> loss;
  TensorLoader& train_loader;
  TensorLoader& eval_loader;  ///< unpadded: each row on one rank
};

struct TensorSettings {
  bool has_ignored = false;  ///< TargetFacts::has_ignored
  bool weighted = false;     ///< batch sizes differ between ranks: average over targets, not ranks
  double target_weight = 1;  ///< TrainingTask::target_weight
};

class TensorTask : public TrainingTask<TensorBatch> {
 public:
  TensorTask(const TensorParts& parts, const TensorSettings& settings)
      : parts_(parts), settings_(settings) {}

  int64_t num_batches() const override { return parts_.train_loader.num_batches(); }
  /// Ignored targets make the numbers of targets differ too.
  bool loss_is_sum() const override { return settings_.weighted || settings_.has_ignored; }
  double target_weight() const override { return settings_.target_weight; }
  TensorBatch load(int64_t draw) override;
  BatchResult forward(const TensorBatch& batch) override;
  void for_each_evaluation_batch(const std::function<bool(TensorBatch batch)>& evaluate) override;
  BatchResult evaluate(const TensorBatch& batch) override;

 private:
  TensorBatch make_batch(TensorRows rows) const;
  BatchResult run(const TensorBatch& batch, bool is_training, bool is_sum) const;

  TensorParts parts_;
  TensorSettings settings_;
};

}  // namespace examples
