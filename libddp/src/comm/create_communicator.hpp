// SPDX-License-Identifier: Apache-2.0
// Creates the world communicator of a Context.
#pragma once

#include <memory>

#include "comm/mpi_runtime.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/core/launch_environment.hpp"

namespace ddp::detail {

/// options.backend "auto": single at world size 1, else nccl on CUDA and mpi on CPU. Collective.
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

}  // namespace ddp::detail
