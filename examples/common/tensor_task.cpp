// SPDX-License-Identifier: Apache-2.0
#include "common/tensor_task.hpp"

#include <torch/torch.h>

#include <utility>

namespace examples {
namespace {

// The mean times its number of targets.
BatchResult as_sum(BatchResult result) {
  const auto& [on_host, on_device] = result.num_targets;
  result.loss =
      on_device.defined() ? result.loss * on_device : result.loss * static_cast<double>(on_host);
  return result;
}

}  // namespace

TensorBatch TensorTask::make_batch(std::vector<at::Tensor> tensors) const {
  return {.tensors = std::move(tensors), .targets_per_sample = settings_.facts.num_per_sample};
}

TensorBatch TensorTask::load(int64_t /*draw*/) {
  return make_batch(parts_.train_loader.next());
}

BatchResult TensorTask::forward(const TensorBatch& batch) {
  const auto result = parts_.loss(batch.tensors, /*is_training=*/true);
  return loss_is_sum() ? as_sum(result) : result;
}

void TensorTask::for_each_evaluation_batch(const std::function<bool(TensorBatch batch)>& evaluate) {
  for (auto& tensors : parts_.eval_loader) {
    if (!evaluate(make_batch(std::move(tensors)))) {
      return;
    }
  }
}

BatchResult TensorTask::evaluate(const TensorBatch& batch) {
  return as_sum(parts_.loss(batch.tensors, /*is_training=*/false));
}

}  // namespace examples
