// SPDX-License-Identifier: Apache-2.0
// Measures the time in which this process ran, for timeouts on other ranks. Suspensions (SIGSTOP,
// `scontrol suspend`, a paused container) do not count.
#pragma once

#include <algorithm>
#include <chrono>

namespace ddp::detail {

/// A loop ticks it. A turn that takes longer than `longest_turn` counts as `longest_turn`, even
/// before it ends. The owner's mutex guards it.
class RunningClock {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;

  explicit RunningClock(Duration longest_turn, TimePoint start = std::chrono::steady_clock::now())
      : longest_turn_(longest_turn), last_tick_(start) {}

  void tick(TimePoint steady) {
    if (const auto lost = steady - last_tick_ - longest_turn_; lost > Duration::zero()) {
      lost_ += lost;
      last_loss_ = lost;
      last_loss_end_ = steady;
    }
    last_tick_ = steady;
  }
  /// The time that the last suspension took, if it ended at most `since` before the last tick.
  Duration recent_loss(Duration since) const {
    return last_tick_ - last_loss_end_ <= since ? last_loss_ : Duration::zero();
  }
  /// Equals the steady clock if the process was never suspended. Never goes back.
  TimePoint at(TimePoint steady) const {
    return std::min(steady, last_tick_ + longest_turn_) - lost_;
  }
  TimePoint now() const { return at(std::chrono::steady_clock::now()); }

 private:
  const Duration longest_turn_;
  TimePoint last_tick_;
  Duration lost_{0};
  Duration last_loss_{0};
  TimePoint last_loss_end_;
};

/// A limit on a wait for other ranks. The waiting loop must query it at least once a second.
class RunningLimit {
 public:
  using TimePoint = RunningClock::TimePoint;

  explicit RunningLimit(RunningClock::Duration limit,
                        TimePoint start = std::chrono::steady_clock::now())
      : clock_(std::chrono::seconds(1), start), end_(start + limit) {}

  bool is_over(TimePoint steady = std::chrono::steady_clock::now()) {
    clock_.tick(steady);
    return clock_.at(steady) >= end_;
  }

 private:
  RunningClock clock_;
  const TimePoint end_;
};

}  // namespace ddp::detail
