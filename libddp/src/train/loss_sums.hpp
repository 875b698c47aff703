// SPDX-License-Identifier: Apache-2.0
// Sums of losses and correct answers, which stay on the device between log lines.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <optional>

#include "ddp/train/metrics.hpp"
#include "train/rank_counter.hpp"

namespace ddp::detail {

class LossSums {
 public:
  explicit LossSums(at::Device device);

  /// The host does not wait.
  void add(const StepMetrics& metrics);

  struct Reading {
    LossTotals totals;
    std::optional<double> grad_norm = {};  ///< of the given step
  };
  /// The host waits for the device. Nothing else of the metrics does.
  Reading read(const StepMetrics& metrics);

 private:
  void add_on_device(const StepMetrics& metrics, double num_targets);
  void add_numbers(const StepMetrics& metrics, double num_targets);
  void add_logged(const StepMetrics& metrics, double num_targets);
  void read_logged(bool all);

  at::Tensor sums_;  ///< float64 [2] on the device: loss times samples, correct answers
  at::Tensor loss_sum_, correct_sum_;
  bool reads_device_ = false;  ///< a step logged nothing, or gave a tensor
  /// Steps whose numbers the host has not read yet, and the sums of the read ones.
  struct Logged {
    LoggedScalar loss;
    LoggedScalar num_correct;
    double num_targets;
  };
  std::deque<Logged> logged_;
  double logged_loss_sum_ = 0;
  double logged_correct_ = 0;
  double loss_samples_ = 0;
  double correct_samples_ = 0;
};

}  // namespace ddp::detail
