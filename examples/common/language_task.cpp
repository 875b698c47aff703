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

struct Tokens {
  ddp::TokenBatch batch;
  at::Tensor target_count;  // on the CPU: a step copies it to the device with its other numbers
};

constexpr int64_t kOffsetsStep = 64;

// Rounds up the number of documents by appending documents without a token. Few lengths mean few
// distinct steps over packed rows.
at::Tensor rounded_up(const at::Tensor& offsets) {
  const int64_t missing = (kOffsetsStep - offsets.numel() % kOffsetsStep) % kOffsetsStep;
  return torch::cat({offsets, offsets.narrow(0, offsets.numel() - 1, 1).expand({missing})});
}

TrainingBatch make_batch(ddp::TokenBatch batch) {
  auto tokens = std::make_shared<Tokens>();
  tokens->batch = std::move(batch);
  auto& held = tokens->batch;
  tokens->target_count = torch::full({}, static_cast<double>(held.num_targets), torch::kFloat32);
  if (held.document_offsets.defined() && held.document_offsets.is_cuda()) {
    held.document_offsets = rounded_up(held.document_offsets);
    // All rows have the same length, and no document is longer.
    held.max_document_length = held.input_ids.size(1);
  }
  return {.object = tokens,
          .tensors = {&held.input_ids, &held.labels, &held.position_ids, &held.document_offsets,
                      &tokens->target_count},
          .num_targets = held.num_targets,
          .num_samples = held.num_tokens,
          .target_count = &tokens->target_count,
          .host_numbers = {held.max_document_length}};
}

}  // namespace

TrainingBatch LanguageTask::load(int64_t /*draw*/) {
  auto batch = parts_.train_loader.next();
  num_tokens_ += batch.num_tokens;
  num_places_ += batch.input_ids.numel();
  return make_batch(std::move(batch));
}

MicroBatchResult LanguageTask::forward(const TrainingBatch& batch) {
  const auto& tokens = static_cast<const Tokens*>(batch.object.get())->batch;
  const auto output = parts_.forward(token_input(tokens), tokens.labels);
  return {.loss = output.loss_sum, .num_correct = output.num_correct};
}

void LanguageTask::for_each_evaluation_batch(
    const std::function<void(TrainingBatch batch)>& evaluate) {
  for (auto& batch : parts_.eval_loader) {
    evaluate(make_batch(batch));
  }
}

}  // namespace examples
