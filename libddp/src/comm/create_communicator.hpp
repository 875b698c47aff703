// SPDX-License-Identifier: Apache-2.0
// The world communicator of a job, as Context makes it.
#pragma once

#include <memory>

#include "comm/mpi_runtime.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/core/launch_environment.hpp"

namespace ddp::detail {

/// options.backend "auto": single at world size 1, else nccl on CUDA and mpi on CPU. Collective.
///
/// `mpi` is the runtime that the caller owns; null where MPI was not started. A failed collective
/// is told to `control_plane` while that lives (groups made by split() may outlive it), and a
/// failure that `control_plane` hears of aborts the communicator. At the end the owner drops the
/// communicator (or calls abort where others may still hold it), then closes the plane, then
/// finalizes `mpi`.
///
/// Throws SettingsError where the backend does not fit the device, the world or this build.
CommunicatorPtr create_communicator(const LaunchEnvironment& launch,
                                    const std::shared_ptr<ControlPlane>& control_plane,
                                    at::Device device, const CommunicatorOptions& options,
                                    std::shared_ptr<MpiRuntime> mpi = nullptr);

}  // namespace ddp::detail
