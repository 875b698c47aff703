// SPDX-License-Identifier: Apache-2.0
#include "common/language_task.hpp"

#include <torch/torch.h>

#include <utility>

namespace examples {

models::TokenInput token_input(const ddp::TokenBatch& batch) {
  return {.input_ids = batch.input_ids,
          .position_ids = batch.position_ids,
          .document_offsets = batch.document_offsets,
          .max_document_length = batch.max_document_length};
}

namespace {

TrainingBatch make_batch(ddp::TokenBatch batch) {
  auto tokens = std::make_shared<ddp::TokenBatch>(std::move(batch));
  return {.object = tokens,
          .tensors = {&tokens->input_ids, &tokens->labels, &tokens->position_ids,
                      &tokens->document_offsets},
          .num_targets = tokens->num_targets,
          .num_samples = tokens->num_tokens};
}

}  // namespace

TrainingBatch LanguageTask::load(int64_t /*draw*/) {
  auto batch = parts_.train_loader.next();
  num_tokens_ += batch.num_tokens;
  num_places_ += batch.input_ids.numel();
  return make_batch(std::move(batch));
}

MicroBatchResult LanguageTask::forward(const TrainingBatch& batch) {
  const auto& tokens = *static_cast<const ddp::TokenBatch*>(batch.object.get());
  const auto output = parts_.forward(token_input(tokens), tokens.labels);
  return {.loss = output.loss_sum, .num_correct = output.num_correct};
}

std::string LanguageTask::why_not_captured() const {
  return "a step over tokens weighs its gradients by the number of its targets, which the host "
         "counts anew for every batch";
}

void LanguageTask::for_each_evaluation_batch(
    const std::function<void(TrainingBatch batch)>& evaluate) {
  for (auto& batch : parts_.eval_loader) {
    evaluate(make_batch(batch));
  }
}

}  // namespace examples
