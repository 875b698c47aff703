// SPDX-License-Identifier: Apache-2.0
#include "language/language_task.hpp"

#include <torch/torch.h>

#include <utility>

namespace examples {

models::TokenInput token_input(const models::TokenBatch& batch) {
  return {.input_ids = batch.input_ids,
          .position_ids = batch.position_ids,
          .document_offsets = batch.document_offsets,
          .max_document_length = batch.max_document_length,
          .target_positions = batch.target_positions};
}

namespace {

constexpr int64_t kOffsetsStep = 64;

// Rounds up the number of documents by appending documents without a token. Few lengths mean few
// distinct steps over packed rows.
at::Tensor rounded_up(const at::Tensor& offsets) {
  const int64_t missing = (kOffsetsStep - offsets.numel() % kOffsetsStep) % kOffsetsStep;
  return torch::cat({offsets, offsets.narrow(0, offsets.numel() - 1, 1).expand({missing})});
}

LanguageBatch make_batch(models::TokenBatch tokens) {
  if (tokens.document_offsets.defined() && tokens.document_offsets.is_cuda()) {
    tokens.document_offsets = rounded_up(tokens.document_offsets);
    // All rows have the same length, and no document is longer.
    tokens.max_document_length = tokens.input_ids.size(1);
  }
  LanguageBatch batch{.tokens = std::move(tokens)};
  batch.target_count =
      torch::full({}, static_cast<double>(batch.tokens.num_targets), torch::kFloat32);
  return batch;
}

/// The count on the loss's device, if it is there. Few numbers are sent to the device per step, so
/// those of later batches may stay on the host.
TargetCount target_count(const LanguageBatch& batch, at::Device device) {
  if (batch.target_count.device() == device) {
    return {.on_device = batch.target_count};
  }
  return {.on_host = batch.tokens.num_targets};
}

}  // namespace

LanguageBatch LanguageTask::load(int64_t /*draw*/) {
  auto tokens = parts_.train_loader.next();
  num_tokens_ += tokens.num_tokens;
  num_positions_ += tokens.input_ids.numel();
  return make_batch(std::move(tokens));
}

BatchResult LanguageTask::forward(const LanguageBatch& batch) {
  const auto output = parts_.forward(token_input(batch.tokens), batch.tokens.labels);
  return {.loss = output.loss_sum,
          .num_correct = output.num_correct,
          .num_targets = target_count(batch, output.loss_sum.device())};
}

void LanguageTask::for_each_evaluation_batch(
    const std::function<bool(LanguageBatch batch)>& evaluate) {
  for (auto& tokens : parts_.eval_loader) {
    if (!evaluate(make_batch(tokens))) {
      return;
    }
  }
}

}  // namespace examples
