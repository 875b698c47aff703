// SPDX-License-Identifier: Apache-2.0
// NCCL communicators from creation to destruction: every wait is bounded and every code is checked.
#pragma once

#include <nccl.h>

#include <chrono>
#include <functional>
#include <string>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// Throws PeerLostError (SettingsError for a usage error) with the operation's name, NCCL's text
/// and advice. ncclSuccess and ncclInProgress pass.
void check_nccl(ncclResult_t code, ncclComm_t comm, const char* operation);

/// Throws if waiting has become pointless.
using StopWaiting = std::function<void()>;

/// Connects all ranks of `control_plane` on CUDA device `device_index`. Collective.
///
/// The ranks first connect a non-blocking communicator, so a missing rank causes a timeout, not a
/// hang. Non-blocking communicators start a thread per collective (NCCL 2.28,
/// ncclGroupEndInternal), which costs more than a small collective. So this returns a blocking
/// child, whose collectives the calling thread enqueues.
ncclComm_t connect_nccl(ControlPlane& control_plane, int device_index,
                        const CommunicatorOptions& options);

/// Runs ncclCommSplit of a blocking communicator in its own thread. Null for a negative color.
ncclComm_t split_nccl(ncclComm_t parent, int device_index, int color, int key,
                      const CommunicatorOptions& options, const StopWaiting& stop_waiting);

/// Runs `action` in its own thread. Returns false if it did not end within `bound`; the thread is
/// then detached.
bool run_bounded(std::chrono::milliseconds bound, std::function<void()> action);

/// Waits for a non-blocking call on `comm`, even if NCCL returned ncclInProgress.
void wait_until_ready(ncclComm_t comm, const char* operation, const StopWaiting& stop_waiting);

}  // namespace ddp::detail
