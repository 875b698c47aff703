// SPDX-License-Identifier: Apache-2.0
// Where a Context begins: this process's place among the ranks, and how they find each other.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/mpi/mpi_runtime.hpp"
#include "core/launch/launch_environment.hpp"
#include "core/launch/rendezvous.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/core/membership.hpp"

namespace ddp::detail {

/// One generation of the job's ranks, before they are connected.
struct Meeting {
  LaunchEnvironment launch;  ///< place_on_host() completes the place on the host
  Membership membership;
  std::shared_ptr<MpiRuntime> mpi;         ///< null: MPI is not needed
  std::shared_ptr<Rendezvous> rendezvous;  ///< null with one rank
  std::optional<at::Device> device;        ///< as in the last generation; empty: not chosen yet
};

/// The ranks that the launcher started. All ranks call it in the same order.
Meeting first_meeting(const ContextOptions& options);
/// The ranks `staying` of the generation `last`, in this order. Only they call it; this process is
/// one of them.
Meeting next_meeting(const ContextOptions& options, const Meeting& last,
                     const std::vector<int>& staying);

/// The members `staying` of `last` as the next generation, in this order. This process is one.
Membership next_generation(const Membership& last, const std::vector<int>& staying);

/// Finds which ranks share a host if the launcher did not set it, or if others than the launcher's
/// have met. `hosts` are those of `membership`.
void place_on_host(const ContextOptions& options, const Membership& membership,
                   LaunchEnvironment& launch);
/// Collective. Throws if ranks share a GPU, or if no GPU is left for this rank.
at::Device choose_device(const ContextOptions& options, const Meeting& meeting,
                         ControlPlane& control_plane);

}  // namespace ddp::detail
