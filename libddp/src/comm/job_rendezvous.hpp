// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "comm/mpi_runtime.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/core/launch_environment.hpp"

namespace ddp::detail {

inline constexpr std::size_t kMinSecretLength = 16;  ///< of DDP_SECRET, in characters

/// How the ranks of this launch find each other, and where they have their common secret from:
///   MPI (where `mpi` is given)            MPI's broadcast carries both
///   torchrun                              the address through torchrun's store, which anybody on
///                                         the network can read and write. The secret is made of
///                                         DDP_SECRET and a random number of rank 0's; else both
///                                         are in a 0600 file whose random name is in the store:
///                                         in control_plane.rendezvous_folder, or, where all ranks
///                                         are on one host, in /tmp; else the store carries the
///                                         secret too, and rank 0 warns
///   a known address (argument, MASTER_*)  DDP_SECRET
///   a Slurm step without MPI              a 0600 file in a shared folder
/// A rank takes the way its own environment tells; nothing in the store makes it take a weaker one.
/// Throws SettingsError where the launch offers none of these or DDP_SECRET is too short.
///
/// `context` counts the contexts that this process made earlier. Each context has its own key in
/// the store, and its own file: contexts that live at the same time do not read each other's
/// contact. All ranks make their contexts in the same order. A known address serves one context at
/// a time.
std::shared_ptr<Rendezvous> make_job_rendezvous(const LaunchEnvironment& launch,
                                                const EnvironmentLookup& environment,
                                                const ControlPlaneOptions& options,
                                                std::shared_ptr<MpiRuntime> mpi, int context = 0);

/// The key in torchrun's store under which rank 0 publishes its contact.
std::string store_key(const LaunchEnvironment& launch, int context = 0);

}  // namespace ddp::detail
