// SPDX-License-Identifier: Apache-2.0
#include "common/training_task.hpp"

#include <torch/torch.h>

namespace examples {

EvaluationSums::EvaluationSums(at::Device device)
    : values_(torch::zeros({3}, torch::TensorOptions().dtype(torch::kFloat64).device(device))) {}

void EvaluationSums::add(const at::Tensor& loss_sum, const at::Tensor& num_correct,
                         int64_t num_targets) {
  const auto correct = num_correct.to(torch::kFloat64);
  const auto targets = torch::full_like(correct, static_cast<double>(num_targets));
  values_ += torch::stack({loss_sum.to(torch::kFloat64), correct, targets});
}

}  // namespace examples
