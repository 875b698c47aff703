// SPDX-License-Identifier: Apache-2.0
#include "common/training_task.hpp"

#include <torch/torch.h>

namespace examples {

EvaluationSums::EvaluationSums(at::Device device)
    : values_(torch::zeros({3}, torch::TensorOptions().dtype(torch::kFloat64).device(device))) {}

void EvaluationSums::add(const at::Tensor& loss_sum, const at::Tensor& num_correct,
                         int64_t num_targets) {
  add(loss_sum, num_correct,
      torch::full({}, static_cast<double>(num_targets),
                  num_correct.options().dtype(torch::kFloat64)));
}

void EvaluationSums::add(const at::Tensor& loss_sum, const at::Tensor& num_correct,
                         const at::Tensor& num_targets) {
  values_ += torch::stack({loss_sum.to(torch::kFloat64), num_correct.to(torch::kFloat64),
                           num_targets.to(torch::kFloat64).reshape(at::IntArrayRef{})});
}

}  // namespace examples
