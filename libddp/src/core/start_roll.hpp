// SPDX-License-Identifier: Apache-2.0
// Records which processes reached MPI_Init, which returns on no rank before all have called it.
// Each process leaves an empty file in a folder of this job and host, which its launcher removes at
// the job's end. Without such a folder nothing is recorded.
#pragma once

#include <string>

#include "ddp/core/launch_environment.hpp"

namespace ddp::detail {

class StartRoll {
 public:
  /// Records this process.
  StartRoll(const LaunchEnvironment& launch, const EnvironmentLookup& environment);

  /// "; missing: rank 1, 3" if the whole job is on this host, else the missing ranks of this host.
  /// Empty if nothing is recorded.
  std::string tell_missing() const;

 private:
  std::string file_of(int local_rank) const;

  const int world_size_, local_world_size_;
  std::string prefix_;  ///< path prefix of the files; empty: nothing is recorded
};

}  // namespace ddp::detail
