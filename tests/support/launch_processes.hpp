// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace ddp::test {

struct Process {
  pid_t pid = 0;
  std::string command;
  bool is_launcher = false;  ///< mpirun, its daemon, or our own wrapper
};

/// All living processes below `ancestor`, zombies left out.
std::vector<Process> descendants(pid_t ancestor);

/// GPUs that a program started now would see; 0 without a driver.
int visible_gpus();

}  // namespace ddp::test
