// SPDX-License-Identifier: Apache-2.0
#include "train/metrics_console.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>

#include "ddp/core/logging.hpp"

namespace ddp::detail {
namespace {

constexpr std::chrono::milliseconds kBarInterval{100};

}  // namespace

MetricsConsole::MetricsConsole(const MetricsOptions& options, bool is_main)
    : lines_(options.progress != "off"),
      bar_(is_main && (options.progress == "bar" ||
                       (options.progress == "auto" && ::isatty(STDERR_FILENO) == 1))),
      max_steps_(options.run.max_steps) {}

MetricsConsole::~MetricsConsole() {
  clear_bar();
}

void MetricsConsole::log_step(const LoggedNumbers& numbers) {
  step_ms_ = numbers.step_ms.value_or(NAN);
  loss_ = numbers.loss;
  if (lines_) {
    clear_bar();
    log_info(log_line(numbers, max_steps_, eta_seconds(numbers.step)));
  }
}

void MetricsConsole::log_evaluation(const EvaluationNumbers& numbers) {
  if (lines_) {
    clear_bar();
    log_info(evaluation_line(numbers, max_steps_));
  }
}

double MetricsConsole::eta_seconds(int64_t done) const {
  return static_cast<double>(max_steps_ - done) * step_ms_ / 1000;
}

void MetricsConsole::draw_bar(int64_t done, bool force) {
  if (!bar_ || (!force && Clock::now() - bar_time_ < kBarInterval)) {
    return;
  }
  bar_time_ = Clock::now();
  struct winsize size {};
  const bool known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  const auto text =
      progress_bar(done, max_steps_, eta_seconds(done), loss_, known ? size.ws_col : 100);
  // Standard error, as the log: one stream keeps the order of lines and bar.
  std::fprintf(stderr, "\r%s\033[K", text.c_str());
  std::fflush(stderr);
  bar_shown_ = true;
}

void MetricsConsole::clear_bar() {
  if (bar_shown_) {
    std::fputs("\r\033[K", stderr);
    std::fflush(stderr);
    bar_shown_ = false;
  }
}

}  // namespace ddp::detail
