// SPDX-License-Identifier: Apache-2.0
// Stopping a run from outside. SIGTERM and SIGUSR1 (preemption, or Slurm's warning before a job
// ends) and Ctrl-C request a stop at a step boundary that all ranks agree on.
#pragma once

#include <signal.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <string>

#include "ddp/core/control_plane.hpp"
#include "ddp/detail/exchange_pace.hpp"

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

/// The ranks' agreement to stop, polled at every step boundary:
///
///   if (stop_signal.should_stop()) { save; throw ddp::Stop("..."); }
///
/// A rank's own request takes effect only when all ranks know it, so all stop at the same step.
/// Ranks exchange requests about every `check_interval` (in large jobs up to five times that),
/// which rank 0 converts to a number of steps. Other calls only compare a counter.
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
