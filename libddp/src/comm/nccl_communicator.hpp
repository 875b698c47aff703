// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/collective_check.hpp"
#include "comm/communicator_state.hpp"
#include "core/rank_position.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// All ranks of `control_plane`, for tensors of `device` (with an index). Collective. Throws
/// SettingsError in a build without CUDA, PeerLostError if NCCL cannot connect the ranks. `check`
/// is for the world; null: calls are not compared. `watch` receives the probes of the world and of
/// groups split from it.
CommunicatorPtr make_nccl_communicator(ControlPlane& control_plane, at::Device device,
                                       const CommunicatorOptions& options,
                                       CollectiveFailureHandler on_failure,
                                       std::shared_ptr<CollectiveCheck> check = nullptr,
                                       const WatchPosition& watch = nullptr);

}  // namespace ddp::detail
