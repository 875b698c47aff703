// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

#include <array>

namespace ddp::detail {

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

}  // namespace ddp::detail
