// SPDX-License-Identifier: Apache-2.0
// Stopping a run from outside. SIGTERM and SIGUSR1 (preemption, or Slurm's warning before a job
// ends) and Ctrl-C request a stop at a step boundary that all ranks agree on.
#pragma once

#include <signal.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include "ddp/core/control_plane.hpp"

namespace ddp {

/// Catches SIGTERM, SIGUSR1 and SIGINT during its lifetime; the handler only sets a flag. The first
/// SIGINT also restores its default action, so a second Ctrl-C exits at once. One object per
/// process; ddp::run makes it.
class StopSignalHandlers {
 public:
  StopSignalHandlers();
  ~StopSignalHandlers();
  StopSignalHandlers(const StopSignalHandlers&) = delete;
  StopSignalHandlers& operator=(const StopSignalHandlers&) = delete;

 private:
  std::array<struct sigaction, 3> previous_;
};

/// Requests a stop of this process, like a signal; any thread.
void request_stop();
/// Whether this process was asked to stop. Other ranks may not know yet.
bool stop_requested();
/// Clears the request (for a program that trains again in the same process, and tests).
void clear_stop_request();

namespace detail {

/// Pause between exchanges of all ranks: exchanges take at most 1/50 of the time, and the pause is
/// at most five intervals. Uses the shorter of the last two durations, because one may include a
/// wait for a slow rank.
class ExchangePace {
 public:
  using Seconds = std::chrono::duration<double>;
  void note(Seconds exchange) { last_ = std::exchange(newest_, exchange); }
  /// From the end of one exchange to the start of the next.
  Seconds pause(Seconds interval) const {
    const auto exchange = std::min(last_, newest_);
    return std::min(std::max(interval - exchange, 49 * exchange), 5 * interval);
  }

 private:
  Seconds last_{0}, newest_{0};
};

}  // namespace detail

/// The ranks' agreement to stop, polled at every step boundary:
///
///   if (stop_signal.should_stop()) { save; throw ddp::Stop("..."); }
///
/// A rank's own request takes effect only when all ranks know it, so all stop at the same step.
/// Ranks exchange requests about every `check_interval`: rank 0 converts it to a number of steps.
/// Other calls only compare a counter. If an exchange takes over 1/50 of the interval, as in
/// large jobs, ranks exchange less often, down to 1/5 as often. At world size 1 it only reads the
/// flag.
class StopSignal {
 public:
  explicit StopSignal(ControlPlane& control_plane,
                      std::chrono::duration<double> check_interval = std::chrono::seconds(1));

  /// True on all ranks in the same call, and in all later calls. Some calls are collective: every
  /// rank must call it equally often, between the same other control-plane collectives.
  bool should_stop();

  /// "rank 2 received SIGUSR1"; empty until should_stop() returns true.
  const std::string& reason() const { return reason_; }

 private:
  int64_t choose_interval(int64_t num_calls) const;

  ControlPlane& control_plane_;
  std::chrono::duration<double> check_interval_;
  std::chrono::steady_clock::time_point last_check_;
  detail::ExchangePace pace_;
  int64_t calls_since_check_ = 0;
  int64_t calls_until_check_ = 1;  ///< the first call exchanges: a signal may have arrived earlier
  std::string reason_;
};

}  // namespace ddp
