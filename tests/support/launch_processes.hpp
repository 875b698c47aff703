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

/// All living processes below `ancestor`, without zombies.
std::vector<Process> descendants(pid_t ancestor);

/// Number of GPUs that a new program would see; 0 without a driver.
int visible_gpus();

}  // namespace ddp::test
