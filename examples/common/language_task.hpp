// SPDX-License-Identifier: Apache-2.0
// Next-token prediction on token files: ragged batches, every target with the same weight.
#pragma once

#include <cstdint>
#include <functional>

#include "common/training_task.hpp"
#include "ddp/data/data_loader.hpp"
#include "ddp/data/token_dataset.hpp"
#include "models/causal_lm.hpp"

namespace examples {

using TokenLoader = ddp::DataLoader<ddp::TokenDataset, ddp::TokenCollate>;

/// Objects that the task uses; all outlive the task.
struct LanguageParts {
  /// The wrapper's forward.
  std::function<models::LmOutput(const models::TokenInput&, const at::Tensor& labels)> forward;
  TokenLoader& train_loader;
  TokenLoader& eval_loader;  ///< unpadded: each row on one rank
  double target_weight = 1;  ///< TrainingTask::target_weight
};

/// Converts a batch to a model's input.
models::TokenInput token_input(const ddp::TokenBatch& batch);

class LanguageTask : public TrainingTask {
 public:
  explicit LanguageTask(const LanguageParts& parts) : parts_(parts) {}

  int64_t num_batches() const override { return parts_.train_loader.num_batches(); }
  bool loss_is_sum() const override { return true; }
  double target_weight() const override { return parts_.target_weight; }
  TrainingBatch load(int64_t draw) override;
  MicroBatchResult forward(const TrainingBatch& batch) override;
  void for_each_evaluation_batch(const std::function<void(TrainingBatch batch)>& evaluate) override;
  MicroBatchResult evaluate(const TrainingBatch& batch) override { return forward(batch); }

  /// Counts over this rank's training so far: tokens, and positions in its batches.
  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_places() const { return num_places_; }

 private:
  LanguageParts parts_;
  int64_t num_tokens_ = 0;
  int64_t num_places_ = 0;
};

}  // namespace examples
