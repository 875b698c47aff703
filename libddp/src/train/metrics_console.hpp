// SPDX-License-Identifier: Apache-2.0
// The log lines of a run and its progress bar, on rank 0. Torch-free.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "ddp/train/options.hpp"
#include "train/metrics_format.hpp"

namespace ddp::detail {

class MetricsConsole {
 public:
  /// Other ranks than rank 0 have no bar.
  MetricsConsole(const MetricsOptions& options, bool is_main);
  /// Clears the bar.
  ~MetricsConsole();
  MetricsConsole(const MetricsConsole&) = delete;
  MetricsConsole& operator=(const MetricsConsole&) = delete;

  /// The bar shows these numbers too.
  void log_step(const LoggedNumbers& numbers);
  void log_evaluation(const EvaluationNumbers& numbers);
  /// At most ten times a second, unless `force`. `done` counts steps.
  void draw_bar(int64_t done, bool force);

 private:
  using Clock = std::chrono::steady_clock;
  double eta_seconds(int64_t done) const;
  void clear_bar();

  const bool lines_;
  const bool bar_;
  const int64_t max_steps_;
  bool bar_shown_ = false;
  Clock::time_point bar_time_{};
  double step_ms_ = NAN;  ///< of the last line
  std::optional<double> loss_;
};

}  // namespace ddp::detail
