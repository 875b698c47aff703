// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <thread>

/// Stops this process, with all its threads, as SIGSTOP from outside does.
inline void stop_for(std::chrono::milliseconds time) {
  if (fork() == 0) {  // the child wakes its parent
    std::this_thread::sleep_for(time);
    kill(getppid(), SIGCONT);
    std::_Exit(0);
  }
  raise(SIGSTOP);
}
