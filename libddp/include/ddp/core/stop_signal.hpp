// SPDX-License-Identifier: Apache-2.0
// Stopping a run from outside. SIGTERM and SIGUSR1 (preemption, or Slurm's warning before a job
// ends) and Ctrl-C request a stop. ddp::run says how ranks agree on the step.
#pragma once

#include <memory>

namespace ddp {

/// Turns SIGTERM, SIGUSR1 and SIGINT into stop requests during its lifetime; a second Ctrl-C exits
/// at once. SIGUSR2 makes rank 0 report what all ranks do and wait for (docs/recipes/hang.md),
/// unless the program handles or ignores it already: then a warning is logged.
/// ddp::run makes one. A program without ddp::run makes one object per process.
class StopSignalHandlers {
 public:
  StopSignalHandlers();  ///< installs the handlers; the destructor restores the previous ones
  ~StopSignalHandlers();

 private:
  struct Previous;
  std::unique_ptr<Previous> previous_;
};

void request_stop();        ///< of this process, like a signal; any thread
bool stop_requested();      ///< was this process asked to stop? Other ranks may not know yet:
                            ///< ControlPlane::agree_any(stop_requested()) is equal on all
void clear_stop_request();  ///< before a program trains again in the same process

}  // namespace ddp
