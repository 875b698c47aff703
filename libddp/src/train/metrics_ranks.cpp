// SPDX-License-Identifier: Apache-2.0
// Numbers of several ranks, and the progress bar.
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <sstream>

#include "ddp/core/error.hpp"
#include "train/metrics_impl.hpp"

namespace ddp::detail {
namespace {

constexpr std::chrono::milliseconds kBarInterval{100};

// A mean of known values; NaN means unknown.
struct Mean {
  double sum = 0;
  int count = 0;
  void add(double value) {
    if (!std::isnan(value)) {
      sum += value;
      ++count;
    }
  }
  double value() const { return count > 0 ? sum / count : NAN; }
};

}  // namespace

JobNumbers::JobNumbers(const std::vector<RankNumbers>& ranks)
    : world_size(static_cast<int>(ranks.size())) {
  Mean exposed, wait, utilisation, power;
  total.energy_j = 0;
  for (const auto& rank : ranks) {
    total.loss_sum += rank.loss_sum;
    total.loss_samples += rank.loss_samples;
    total.correct += rank.correct;
    total.correct_samples += rank.correct_samples;
    total.samples += rank.samples;
    total.energy_j += rank.energy_j;
    total.seconds = std::max(total.seconds, rank.seconds);
    total.steps = std::max(total.steps, rank.steps);
    total.memory_gib = std::fmax(total.memory_gib, rank.memory_gib);
    exposed.add(rank.exposed_comm_ms);
    wait.add(rank.loader_wait_ms);
    utilisation.add(rank.utilisation);
    power.add(rank.power_w);
  }
  total.exposed_comm_ms = exposed.value();
  total.loader_wait_ms = wait.value();
  total.utilisation = utilisation.value();
  total.power_w = power.value();
}

void MetricsImpl::draw_bar(int64_t step, bool force) {
  if (!bar_ || (!force && Clock::now() - bar_time_ < kBarInterval)) {
    return;
  }
  bar_time_ = Clock::now();
  struct winsize size {};
  const bool known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  const auto text = progress_bar(step + 1, options_.run.max_steps, eta_seconds(step), last_loss_,
                                 known ? size.ws_col : 100);
  // Standard error, as the log: one stream keeps the order of lines and bar.
  std::fprintf(stderr, "\r%s\033[K", text.c_str());
  std::fflush(stderr);
  bar_shown_ = true;
}

void MetricsImpl::clear_bar() {
  if (bar_shown_) {
    std::fputs("\r\033[K", stderr);
    std::fflush(stderr);
    bar_shown_ = false;
  }
}

}  // namespace ddp::detail
