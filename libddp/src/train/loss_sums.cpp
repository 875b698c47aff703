// SPDX-License-Identifier: Apache-2.0
#include "train/loss_sums.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace ddp::detail {

LossSums::LossSums(at::Device device)
    : sums_(at::zeros({2}, at::TensorOptions().dtype(at::kDouble).device(device))),
      loss_sum_(sums_[0]),
      correct_sum_(sums_[1]) {}

void LossSums::add(const StepMetrics& metrics) {
  const auto n = static_cast<double>(metrics.num_targets.value_or(metrics.num_samples));
  add_on_device(metrics, n);
  add_logged(metrics, n);
  has_steps_ = true;
}

// Two one-element kernels; a loss in a graph's memory is read before the next replay.
void LossSums::add_on_device(const StepMetrics& metrics, double num_targets) {
  at::NoGradGuard no_grad;
  if (metrics.loss.defined()) {
    loss_sum_.add_(metrics.loss.detach().reshape({}), num_targets);
    loss_samples_ += num_targets;
  }
  if (metrics.num_correct.defined()) {
    correct_sum_.add_(metrics.num_correct.detach().reshape({}));
    correct_samples_ += num_targets;
  }
}

void LossSums::add_logged(const StepMetrics& metrics, double num_targets) {
  if (metrics.loss_at < 0 && metrics.num_correct_at < 0) {
    reads_device_ = true;
    return;
  }
  reads_device_ = reads_device_ && has_steps_;
  loss_samples_ += metrics.loss_at >= 0 ? num_targets : 0;
  correct_samples_ += metrics.num_correct_at >= 0 ? num_targets : 0;
  logged_.push_back({metrics.log, metrics.loss_at, metrics.num_correct_at, num_targets});
  read_logs(/*all=*/false);
}

// Without `all`, reads only available logs: the host does not wait.
void LossSums::read_logs(bool all) {
  while (!logged_.empty() && (all || logged_.front().log.is_ready())) {
    const auto& [log, loss_at, num_correct_at, n] = logged_.front();
    if (loss_at >= 0) {
      logged_loss_sum_ += n * log[loss_at];
    }
    if (num_correct_at >= 0) {
      logged_correct_ += log[num_correct_at];
    }
    logged_.pop_front();
  }
}

LossSums::Reading LossSums::read(const StepMetrics& metrics) {
  at::NoGradGuard no_grad;
  read_logs(/*all=*/true);
  Reading reading{.totals = {.loss_sum = logged_loss_sum_,
                             .correct = logged_correct_,
                             .loss_samples = loss_samples_,
                             .correct_samples = correct_samples_}};
  if (metrics.grad_norm_at >= 0) {
    reading.grad_norm = metrics.log[metrics.grad_norm_at];
  }
  if (reads_device_) {
    auto values = sums_;
    if (metrics.grad_norm.defined()) {
      values = at::cat({sums_, metrics.grad_norm.detach().reshape({1}).to(sums_.options())});
    }
    const auto host = values.cpu();
    const double* data = host.const_data_ptr<double>();
    reading.totals.loss_sum += data[0];
    reading.totals.correct += data[1];
    reading.grad_norm = metrics.grad_norm.defined() ? std::optional(data[2]) : reading.grad_norm;
  }
  return reading;
}

}  // namespace ddp::detail
