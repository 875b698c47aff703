// SPDX-License-Identifier: Apache-2.0
#include "common/evaluation.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>

#include "ddp/detail/text.hpp"

namespace examples {

ddp::EpochMetrics epoch_metrics(const EvalResult& result) {
  ddp::EpochMetrics metrics{.test_loss = result.loss};
  if (!std::isnan(result.accuracy)) {
    metrics.test_accuracy = result.accuracy;
  }
  return metrics;
}

EvaluationSums::EvaluationSums(at::Device device)
    : values_(torch::zeros({3}, torch::TensorOptions().dtype(torch::kFloat64).device(device))) {}

void EvaluationSums::add(const BatchResult& batch) {
  const auto& [on_host, on_device] = batch.num_targets;
  const auto number = [&](double value) { return torch::full({}, value, values_.options()); };
  const auto num_targets = on_device.defined()
                               ? on_device.to(torch::kFloat64).reshape(at::IntArrayRef{})
                               : number(static_cast<double>(on_host));
  const auto num_correct =
      batch.num_correct.defined() ? batch.num_correct.to(torch::kFloat64) : number(NAN);
  values_ += torch::stack({batch.loss.to(torch::kFloat64), num_correct, num_targets});
}

EvalResult EvaluationSums::reduce(ddp::Communicator& communicator) {
  communicator.all_reduce(values_)->wait();
  const auto host = values_.to(torch::kCPU);
  const auto* values = host.const_data_ptr<double>();
  const double count = std::max(1.0, values[2]);
  return {.loss = values[0] / count,
          .accuracy = values[1] / count,
          .num_targets = static_cast<int64_t>(values[2])};
}

namespace {

constexpr const char* kBestText = "best_evaluation";

}  // namespace

void BestEvaluation::restore() {
  const auto text = checkpointer_.text(kBestText);
  int64_t steps_done = 0;
  double loss = 0;
  const ddp::detail::ClassicNumbers numbers;
  if (std::sscanf(text.c_str(), "%" SCNd64 " %la", &steps_done, &loss) == 2) {
    steps_done_ = steps_done;
    loss_ = loss;
  }
}

bool BestEvaluation::add(int64_t steps_done, double loss) {
  if (!(loss < loss_)) {
    return false;
  }
  steps_done_ = steps_done;
  loss_ = loss;
  const ddp::detail::ClassicNumbers numbers;
  char text[64];
  std::snprintf(text, sizeof text, "%" PRId64 " %a", steps_done, loss);  // %a keeps every bit
  checkpointer_.set_text(kBestText, text);
  return true;
}

}  // namespace examples
