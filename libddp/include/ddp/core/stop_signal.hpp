// SPDX-License-Identifier: Apache-2.0
// Stopping a run from outside: SIGTERM and SIGUSR1 (Slurm's warning before the end of a job, a
// preemption) and Ctrl-C ask for a stop at a step boundary that all ranks agree on.
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

/// Catches SIGTERM, SIGUSR1 and SIGINT while it lives: the handler only sets a flag. The first
/// SIGINT asks for a stop like the others; after it SIGINT has its default action, so that a second
/// Ctrl-C leaves at once. One object a process; ddp::run makes it.
class StopSignalHandlers {
 public:
  StopSignalHandlers();
  ~StopSignalHandlers();
  StopSignalHandlers(const StopSignalHandlers&) = delete;
  StopSignalHandlers& operator=(const StopSignalHandlers&) = delete;

 private:
  std::array<struct sigaction, 3> previous_;
};

/// Asks this process to stop, as a signal would; any thread.
void request_stop();
/// Whether this process was asked to stop; the others may not know yet.
bool stop_requested();
/// Forgets the request (a program that trains again in the same process; tests).
void clear_stop_request();

namespace detail {

/// How long to wait between exchanges of all ranks, so that they take at most a fiftieth of the
/// time, and come at least every five intervals. Of two durations in a row the shorter one counts:
/// the other may be a wait for a slow rank.
class ExchangePace {
 public:
  using Seconds = std::chrono::duration<double>;
  void note(Seconds exchange) { last_ = std::exchange(newest_, exchange); }
  /// From the end of one exchange to the beginning of the next.
  Seconds pause(Seconds interval) const {
    const auto exchange = std::min(last_, newest_);
    return std::min(std::max(interval - exchange, 49 * exchange), 5 * interval);
  }

 private:
  Seconds last_{0}, newest_{0};
};

}  // namespace detail

/// The ranks' agreement to stop, asked at every step boundary:
///
///   if (stop_signal.should_stop()) { save; throw ddp::Stop("..."); }
///
/// A rank's own request does nothing until all ranks know of it, so all stop at the same step. They
/// ask each other about every `check_interval`, at a number of steps that rank 0 chooses from the
/// time steps take; in between the call is a comparison. Where asking itself takes more than a
/// fiftieth of the interval, as in large jobs, they ask less often, down to a fifth as often. Alone
/// it is the flag itself.
class StopSignal {
 public:
  explicit StopSignal(ControlPlane& control_plane,
                      std::chrono::duration<double> check_interval = std::chrono::seconds(1));

  /// True on all ranks in the same call, and from then on. Collective on some calls: every rank
  /// calls it equally often, between the same other collectives of the control plane.
  bool should_stop();

  /// "rank 2 received SIGUSR1"; empty before should_stop() returned true.
  const std::string& reason() const { return reason_; }

 private:
  int64_t choose_interval(int64_t num_calls) const;

  ControlPlane& control_plane_;
  std::chrono::duration<double> check_interval_;
  std::chrono::steady_clock::time_point last_check_;
  detail::ExchangePace pace_;
  int64_t calls_since_check_ = 0;
  int64_t calls_until_check_ = 1;  ///< the first call asks: a signal may have come before it
  std::string reason_;
};

}  // namespace ddp
