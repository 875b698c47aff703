// SPDX-License-Identifier: Apache-2.0
// Next-token or masked-token prediction on token files: ragged batches, every target with the same
// weight.
#pragma once

#include <cstdint>
#include <functional>

#include "common/training_task.hpp"
#include "ddp/data/data_loader.hpp"
#include "models/language_model.hpp"
#include "models/tokens/token_dataset.hpp"

namespace examples {

using TokenLoader = ddp::DataLoader<models::TokenDataset, models::TokenCollate>;

struct LanguageBatch {
  models::TokenBatch tokens = {};
  /// tokens.num_targets as a float32 of one element. Batches of equal shapes have different counts,
  /// so a captured step gets the count on the device with its other numbers.
  at::Tensor target_count = {};

  int64_t num_targets() const { return tokens.num_targets; }
  int64_t num_samples() const { return tokens.num_tokens; }  ///< without padding
};
inline void for_each_tensor(LanguageBatch& batch, const ddp::TensorVisitor& visit) {
  visit(batch.tokens.input_ids);
  visit(batch.tokens.labels);
  visit(batch.tokens.position_ids);
  visit(batch.tokens.document_offsets);
  visit(batch.tokens.target_positions);
  visit(batch.target_count);
  visit(batch.tokens.max_document_length);
}

/// Objects that the task uses; all outlive the task.
struct LanguageParts {
  /// The wrapper's forward.
  std::function<models::LmOutput(const models::TokenInput&, const at::Tensor& labels)> forward;
  TokenLoader& train_loader;
  TokenLoader& eval_loader;  ///< unpadded: each row on one rank
  double target_weight = 1;  ///< TrainingTask::target_weight
};

/// Converts a batch to a model's input.
models::TokenInput token_input(const models::TokenBatch& batch);

class LanguageTask : public TrainingTask<LanguageBatch> {
 public:
  explicit LanguageTask(const LanguageParts& parts) : parts_(parts) {}

  int64_t num_batches() const override { return parts_.train_loader.num_batches(); }
  bool loss_is_sum() const override { return true; }
  double target_weight() const override { return parts_.target_weight; }
  LanguageBatch load(int64_t draw) override;
  BatchResult forward(const LanguageBatch& batch) override;
  void for_each_evaluation_batch(const std::function<bool(LanguageBatch batch)>& evaluate) override;
  BatchResult evaluate(const LanguageBatch& batch) override { return forward(batch); }

  /// Counts over this rank's training so far: tokens, and positions in its batches.
  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_positions() const { return num_positions_; }

 private:
  LanguageParts parts_;
  int64_t num_tokens_ = 0;
  int64_t num_positions_ = 0;
};

}  // namespace examples
