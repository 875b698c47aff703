// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "comm/mpi/mpi_runtime.hpp"
#include "core/launch/detect_launch.hpp"
#include "core/launch/rendezvous.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

inline constexpr std::size_t kMinSecretLength = 16;  ///< minimum of DDP_SECRET, in characters

/// How the ranks of `membership` find each other, and the source of their common secret:
///   MPI (if `mpi` is given)               MPI's broadcast carries both
///   torchrun                              torchrun's store carries the address; anyone on the
///                                         network can read and write it. The secret is derived
///                                         from DDP_SECRET and rank 0's random number. Without
///                                         DDP_SECRET a 0600 file holds both; the store holds its
///                                         random name. The file is in rendezvous_folder, or in
///                                         /tmp if all ranks are on one host. Otherwise the store
///                                         carries the secret too, and rank 0 warns
///   a known address (argument, MASTER_*)  DDP_SECRET
///   a Slurm step without MPI              a 0600 file in a shared folder
/// A rank chooses by its own environment, so data in the store cannot make it choose a weaker way.
/// Throws SettingsError if the launch offers none of these or DDP_SECRET is too short.
///
/// `context` counts this process's earlier contexts. Each context has its own store key and file,
/// so concurrent contexts do not read each other's contact. All ranks must make their contexts in
/// the same order. A known address serves one context at a time.
std::shared_ptr<Rendezvous> make_job_rendezvous(const LaunchEnvironment& launch,
                                                const Membership& membership,
                                                const EnvironmentLookup& environment,
                                                const ControlPlaneOptions& options,
                                                std::shared_ptr<MpiRuntime> mpi, int context = 0);

/// The key in torchrun's store under which rank 0 publishes its contact.
std::string store_key(const LaunchEnvironment& launch, int context = 0);

}  // namespace ddp::detail
