// SPDX-License-Identifier: Apache-2.0
// The log lines of a run and its progress bar, on rank 0. Torch-free.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "ddp/train/options.hpp"
#include "train/metrics/metrics_format.hpp"

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
  /// Steps of the whole run, for the bar and the time that is left; 0: unknown.
  void set_max_steps(int64_t steps) { max_steps_ = steps; }
  /// At most ten times a second, unless `force`. `done` counts steps.
  void draw_bar(int64_t done, bool force);
  void clear_bar();

 private:
  using Clock = std::chrono::steady_clock;
  double eta_seconds(const LoggedNumbers& last, int64_t done) const;

  const bool lines_;
  const bool is_terminal_;  ///< standard error: there long lines are shortened
  const bool bar_;
  int64_t max_steps_ = 0;
  Clock::time_point bar_time_{};
  LoggedNumbers last_;  ///< of the last line
};

}  // namespace ddp::detail
