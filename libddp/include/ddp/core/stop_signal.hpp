// SPDX-License-Identifier: Apache-2.0
// Stopping a run from outside. SIGTERM and SIGUSR1 (preemption, or Slurm's warning before a job
// ends) and Ctrl-C request a stop at a step boundary that all ranks agree on.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "ddp/core/control_plane.hpp"

namespace ddp {

/// Turns SIGTERM, SIGUSR1 and SIGINT into stop requests during its lifetime; a second Ctrl-C exits
/// at once. ddp::run makes one. A program without ddp::run makes one object per process.
class StopSignalHandlers {
 public:
  StopSignalHandlers();
  ~StopSignalHandlers();

 private:
  struct Previous;
  std::unique_ptr<Previous> previous_;
};

void request_stop();        ///< of this process, like a signal; any thread
bool stop_requested();      ///< was this process asked to stop? Other ranks may not know yet
void clear_stop_request();  ///< before a program trains again in the same process

/// The ranks' agreement to stop, polled at every step boundary:
///
///   if (stop_signal.should_stop()) { save; throw ddp::Stop("..."); }
///
/// A request takes effect when all ranks know it, so all stop at the same step. Ranks exchange
/// requests every `check_interval`, in large jobs up to five times less often.
class StopSignal {
 public:
  explicit StopSignal(ControlPlane& control_plane,
                      std::chrono::duration<double> check_interval = std::chrono::seconds(1));
  ~StopSignal();

  /// True on all ranks in the same call, and in all later calls. Some calls are collective: every
  /// rank must call it equally often, between the same other control-plane collectives.
  bool should_stop();

  const std::string& reason() const;  ///< "rank 2 received SIGUSR1"; empty before a stop

 private:
  class Agreement;
  std::unique_ptr<Agreement> agreement_;
};

}  // namespace ddp
