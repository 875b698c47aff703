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

void LanguageTask::load(int64_t /*draw*/) {
  batch_ = parts_.train_loader.next();
  num_tokens_ += batch_.num_tokens;
  num_places_ += batch_.input_ids.numel();
}

MicroBatchResult LanguageTask::forward() {
  const auto batch = std::exchange(batch_, {});
  const auto output = parts_.forward(token_input(batch), batch.labels);
  return {.loss = output.loss_sum,
          .num_correct = output.num_correct,
          .num_targets = batch.num_targets,
          .num_samples = batch.num_tokens};
}

void LanguageTask::evaluate(EvaluationSums& sums) {
  for (auto& batch : parts_.eval_loader) {
    const auto output = parts_.forward(token_input(batch), batch.labels);
    sums.add(output.loss_sum, output.num_correct, batch.num_targets);
  }
}

}  // namespace examples
