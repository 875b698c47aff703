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
  add_numbers(metrics, n);
}

// Two one-element kernels; a loss in a graph's memory is read before the next replay.
void LossSums::add_on_device(const StepMetrics& metrics, double num_targets) {
  at::NoGradGuard no_grad;
  if (const auto& loss = metrics.loss.tensor; loss.defined()) {
    loss_sum_.add_(loss.detach().reshape({}), num_targets);
    loss_samples_ += num_targets;
    reads_device_ = true;
  }
  if (const auto& num_correct = metrics.num_correct.tensor; num_correct.defined()) {
    correct_sum_.add_(num_correct.detach().reshape({}));
    correct_samples_ += num_targets;
    reads_device_ = true;
  }
}

void LossSums::add_numbers(const StepMetrics& metrics, double num_targets) {
  if (metrics.loss.number) {
    logged_loss_sum_ += num_targets * *metrics.loss.number;
    loss_samples_ += num_targets;
  }
  if (metrics.num_correct.number) {
    logged_correct_ += *metrics.num_correct.number;
    correct_samples_ += num_targets;
  }
}

void LossSums::add_logged(const StepMetrics& metrics, double num_targets) {
  const Logged step{metrics.loss.logged, metrics.num_correct.logged, num_targets};
  if (!step.loss.has_value() && !step.num_correct.has_value()) {
    reads_device_ = true;  // reading must wait for the device
    return;
  }
  loss_samples_ += step.loss.has_value() ? num_targets : 0;
  correct_samples_ += step.num_correct.has_value() ? num_targets : 0;
  logged_.push_back(step);
  read_logged(/*all=*/false);
}

// Without `all`, reads only available numbers: the host does not wait.
void LossSums::read_logged(bool all) {
  while (!logged_.empty()) {
    const auto& [loss, num_correct, num_targets] = logged_.front();
    if (!all && !(loss.is_ready() && num_correct.is_ready())) {
      return;
    }
    if (loss.has_value()) {
      logged_loss_sum_ += num_targets * loss.value();
    }
    if (num_correct.has_value()) {
      logged_correct_ += num_correct.value();
    }
    logged_.pop_front();
  }
}

LossSums::Reading LossSums::read(const StepMetrics& metrics) {
  at::NoGradGuard no_grad;
  read_logged(/*all=*/true);
  Reading reading{.totals = {.loss_sum = logged_loss_sum_,
                             .correct = logged_correct_,
                             .loss_samples = loss_samples_,
                             .correct_samples = correct_samples_}};
  const auto& [norm, logged_norm, norm_number] = metrics.grad_norm;
  reading.grad_norm = logged_norm.has_value() ? std::optional(logged_norm.value()) : norm_number;
  if (reads_device_ || norm.defined()) {
    auto values = sums_;
    if (norm.defined()) {
      values = at::cat({sums_, norm.detach().reshape({1}).to(sums_.options())});
    }
    const auto host = values.cpu();
    const double* data = host.const_data_ptr<double>();
    reading.totals.loss_sum += data[0];
    reading.totals.correct += data[1];
    reading.grad_norm = norm.defined() ? std::optional(data[2]) : reading.grad_norm;
  }
  return reading;
}

}  // namespace ddp::detail
