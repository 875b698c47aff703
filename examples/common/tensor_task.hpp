// SPDX-License-Identifier: Apache-2.0
// Supervised training on rows of tensors.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "common/sample_loss.hpp"
#include "common/training_task.hpp"
#include "ddp/data/data_loader.hpp"
#include "ddp/data/tensor_dataset.hpp"

namespace examples {

struct TensorBatch {
  std::vector<at::Tensor> tensors = {};  ///< of TensorData::names, [N, …]
  int64_t targets_per_sample = 1;

  int64_t num_samples() const { return tensors.front().size(0); }
  int64_t num_targets() const { return num_samples() * targets_per_sample; }
};
inline void for_each_tensor(TensorBatch& batch, const ddp::TensorVisitor& visit) {
  for (auto& tensor : batch.tensors) {
    visit(tensor);
  }
}

using TensorLoader = ddp::DataLoader<ddp::TensorListDataset>;

/// Objects that the task uses; all outlive the task.
struct TensorParts {
  /// The wrapper's forward on a batch, and its mean loss: see sample_loss.
  std::function<BatchResult(const std::vector<at::Tensor>&, bool is_training)> loss;
  TensorLoader& train_loader;
  TensorLoader& eval_loader;  ///< unpadded: each row on one rank
};

struct TensorSettings {
  TargetFacts facts = {};
  bool weighted = false;     ///< batch sizes differ between ranks: average over targets, not ranks
  double target_weight = 1;  ///< TrainingTask::target_weight
};

class TensorTask : public TrainingTask<TensorBatch> {
 public:
  TensorTask(const TensorParts& parts, const TensorSettings& settings)
      : parts_(parts), settings_(settings) {}

  int64_t num_batches() const override { return parts_.train_loader.num_batches(); }
  /// Ignored targets make the numbers of targets differ too.
  bool loss_is_sum() const override { return settings_.weighted || settings_.facts.has_ignored; }
  double target_weight() const override { return settings_.target_weight; }
  TensorBatch load(int64_t draw) override;
  BatchResult forward(const TensorBatch& batch) override;
  void for_each_evaluation_batch(const std::function<bool(TensorBatch batch)>& evaluate) override;
  BatchResult evaluate(const TensorBatch& batch) override;

 private:
  TensorBatch make_batch(std::vector<at::Tensor> tensors) const;

  TensorParts parts_;
  TensorSettings settings_;
};

}  // namespace examples
