// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <string>

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

/// For the message of an MPI that did not start: nodes that cannot reach each other wait like ranks
/// whose peers are missing. Names this host's interfaces, and how to choose one. Begins with "; ".
/// Empty if all ranks are on one host.
std::string describe_network(const LaunchEnvironment& launch, const EnvironmentLookup& environment);

}  // namespace ddp::detail
