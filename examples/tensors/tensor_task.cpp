// SPDX-License-Identifier: Apache-2.0
#include "tensors/tensor_task.hpp"

#include <torch/torch.h>

#include <utility>

namespace examples {

TensorBatch TensorTask::make_batch(TensorRows rows) const {
  TensorBatch batch{.rows = std::move(rows)};
  if (settings_.has_ignored) {
    batch.target_count =
        torch::full({}, static_cast<double>(batch.rows.num_targets), torch::kFloat32);
  }
  return batch;
}

// A count that stayed on the host belongs to an eager step.
BatchResult TensorTask::run(const TensorBatch& batch, bool is_training, bool is_sum) const {
  const auto [mean, num_correct] = parts_.loss(batch.rows, is_training);
  BatchResult result{.loss = mean, .num_correct = num_correct};
  if (batch.target_count.defined() && batch.target_count.device() == mean.device()) {
    result.num_targets.on_device = batch.target_count;
  } else {
    result.num_targets.on_host = batch.rows.num_targets;
  }
  if (is_sum) {
    const auto& [on_host, on_device] = result.num_targets;
    result.loss = on_device.defined() ? mean * on_device : mean * static_cast<double>(on_host);
  }
  return result;
}

TensorBatch TensorTask::load(int64_t /*draw*/) {
  return make_batch(parts_.train_loader.next());
}

BatchResult TensorTask::forward(const TensorBatch& batch) {
  return run(batch, /*is_training=*/true, loss_is_sum());
}

void TensorTask::for_each_evaluation_batch(const std::function<bool(TensorBatch batch)>& evaluate) {
  for (auto& rows : parts_.eval_loader) {
    if (!evaluate(make_batch(std::move(rows)))) {
      return;
    }
  }
}

BatchResult TensorTask::evaluate(const TensorBatch& batch) {
  return run(batch, /*is_training=*/false, /*is_sum=*/true);
}

}  // namespace examples
