// SPDX-License-Identifier: Apache-2.0
// When saves are due, and after which steps the ranks exchange their statuses. Torch-free.
#pragma once

#include <chrono>
#include <cstdint>

#include "core/exchange_pace.hpp"
#include "ddp/core/stop_signal.hpp"
#include "ddp/train/options.hpp"

namespace ddp::detail {

/// `done` is a number of steps done. Callers pass the time, so that tests need no sleeps.
class CheckpointSchedule {
 public:
  using Clock = std::chrono::steady_clock;
  /// Without a folder no save is due, but the ranks exchange stop requests.
  CheckpointSchedule(const CheckpointOptions& options, Clock::time_point now);

  bool is_due_by_steps(int64_t done) const { return every_steps_ > 0 && done % every_steps_ == 0; }
  bool is_due_by_time(Clock::time_point now) const;
  /// A save begins. A failed save counts too: the next one is due as usual.
  void note_save(Clock::time_point now) { last_save_ = now; }

  bool is_exchange_due(int64_t done) const { return done >= next_exchange_; }
  /// Measures the duration of the steps since the last exchange.
  void begin_exchange(int64_t done, Clock::time_point now);
  /// Chooses the next exchange from values that all ranks know: the slowest rank's step and rank
  /// 0's pause, in seconds.
  void end_exchange(int64_t done, Clock::time_point now, double slowest_step, double pause);

  /// This rank's mean since the last exchange; 0: nothing measured yet.
  double step_seconds() const { return step_seconds_; }
  /// From the end of this exchange to the start of the next; rank 0's counts.
  double pause_seconds() const { return pace_.pause(interval_).count(); }

 private:
  const int64_t every_steps_;   ///< 0: not by steps
  const double every_minutes_;  ///< 0: not by time
  const std::chrono::duration<double> interval_;
  Clock::time_point last_save_;

  int64_t next_exchange_ = 0;  ///< number of steps done at the next exchange
  int64_t exchange_step_ = 0;  ///< number of steps done at the last exchange
  Clock::time_point begun_;    ///< begin of the last exchange
  Clock::time_point ended_;    ///< end of the last exchange
  double step_seconds_ = 0;
  ExchangePace pace_;
};

}  // namespace ddp::detail
