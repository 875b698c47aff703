// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "comm/mpi_runtime.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/core/launch_environment.hpp"

namespace ddp::detail {

/// How the ranks of this launch find each other:
///   MPI (where `mpi` is given)            broadcast; the secret travels with it
///   torchrun                              its store, as a client: our address, and the secret
///   where
///                                         DDP_SECRET is not set (the store itself is open to all)
///   a known address (argument, MASTER_*)  DDP_SECRET
///   a Slurm step without MPI              a 0600 file in a shared folder
/// Throws SettingsError where the launch offers none of these.
std::shared_ptr<Rendezvous> make_job_rendezvous(const LaunchEnvironment& launch,
                                                const EnvironmentLookup& environment,
                                                const ControlPlaneOptions& options,
                                                std::shared_ptr<MpiRuntime> mpi);

}  // namespace ddp::detail
