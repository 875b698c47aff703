// SPDX-License-Identifier: Apache-2.0
// Who came as far as MPI_Init, which returns on no rank before all have called it: each process
// leaves an empty file in the folder that its launcher made for this job on this host, and removes
// at the job's end. Where a launcher tells no folder nothing is known.
#pragma once

#include <string>

#include "ddp/core/launch_environment.hpp"

namespace ddp::detail {

class StartRoll {
 public:
  /// Signs this process in.
  StartRoll(const LaunchEnvironment& launch, const EnvironmentLookup& environment);

  /// "; missing: rank 1, 3" where the whole job is on this host, else who of this host is missing.
  /// Empty where nothing is known.
  std::string tell_missing() const;

 private:
  std::string file_of(int local_rank) const;

  const int world_size_, local_world_size_;
  std::string prefix_;  ///< of the files; empty: nothing is known
};

}  // namespace ddp::detail
