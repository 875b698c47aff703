// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>

#include "comm/mpi/mpi_runtime.hpp"
#include "core/launch/detect_launch.hpp"

namespace ddp::detail {

/// Initialises MPI and sets the rank and the number of ranks in `launch` if only MPI knows them.
/// Throws PeerLostError naming the missing ranks if a rank does not start MPI within `timeout`.
/// Throws SettingsError if MPI and the environment disagree about this process's place. `launch`
/// was detected from `environment`.
std::shared_ptr<MpiRuntime> start_mpi(LaunchEnvironment& launch,
                                      const EnvironmentLookup& environment,
                                      std::chrono::milliseconds timeout);

}  // namespace ddp::detail
