// SPDX-License-Identifier: Apache-2.0
#include "train/metrics/console/metrics_console.hpp"

#include <unistd.h>

#include "core/log/terminal.hpp"
#include "core/log/terminal_line.hpp"
#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

constexpr std::chrono::milliseconds kBarInterval{100};

}  // namespace

MetricsConsole::MetricsConsole(const MetricsOptions& options, bool is_main)
    : lines_(options.progress != ProgressStyle::Off),
      is_terminal_(::isatty(STDERR_FILENO) == 1),
      bar_(is_main && (options.progress == ProgressStyle::Bar ||
                       (options.progress == ProgressStyle::Auto && is_terminal_))) {}

MetricsConsole::~MetricsConsole() {
  clear_bar();
}

void MetricsConsole::clear_bar() {
  if (bar_) {
    clear_terminal_line();
  }
}

void MetricsConsole::log_step(const LoggedNumbers& numbers) {
  if (lines_) {
    log_info(log_line(numbers, max_steps_, eta_seconds(numbers, numbers.step), last_,
                      is_terminal_ ? kLogColumns : std::string::npos));
  }
  last_ = numbers;
}

void MetricsConsole::log_evaluation(const EvaluationNumbers& numbers) {
  if (lines_) {
    log_info(evaluation_line(numbers, max_steps_));
  }
}

double MetricsConsole::eta_seconds(const LoggedNumbers& last, int64_t done) const {
  return static_cast<double>(max_steps_ - done) * last.step_ms.value_or(NAN) / 1000;
}

void MetricsConsole::draw_bar(int64_t done, bool force) {
  if (!bar_ || (!force && Clock::now() - bar_time_ < kBarInterval)) {
    return;
  }
  bar_time_ = Clock::now();
  show_terminal_line(progress_bar(done, max_steps_, eta_seconds(last_, done), last_.loss,
                                  terminal_columns(STDERR_FILENO).value_or(100)));
}

}  // namespace ddp::detail
