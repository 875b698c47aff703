// SPDX-License-Identifier: Apache-2.0
// NCCL communicators from their first byte to their end: every wait has a bound, every code is
// checked.
#pragma once

#include <nccl.h>

#include <chrono>
#include <functional>
#include <string>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// Throws PeerLostError (SettingsError for a wrong use) with the operation's name, NCCL's text and
/// what to look at. ncclSuccess and ncclInProgress pass.
void check_nccl(ncclResult_t code, ncclComm_t comm, const char* operation);

/// Throws where waiting has become pointless.
using StopWaiting = std::function<void()>;

/// Connects all ranks of `control_plane` on CUDA device `device_index`. Collective.
///
/// The ranks meet in a non-blocking communicator, so that a rank that never comes costs a timeout
/// and not a hang. A non-blocking communicator starts a thread for each collective, though
/// (NCCL 2.28, ncclGroupEndInternal), which costs more than a small collective: the one returned is
/// a blocking child of it, whose collectives are enqueued by the calling thread.
ncclComm_t connect_nccl(ControlPlane& control_plane, int device_index,
                        const CommunicatorOptions& options);

/// ncclCommSplit of a blocking communicator, in a thread of its own; null for a negative color.
ncclComm_t split_nccl(ncclComm_t parent, int device_index, int color, int key,
                      const CommunicatorOptions& options, const StopWaiting& stop_waiting);

/// Runs `action` in a thread of its own. False where it did not end within `bound`: the thread is
/// then left behind.
bool run_bounded(std::chrono::milliseconds bound, std::function<void()> action);

/// Waits for a non-blocking call on `comm`; `ready` also where NCCL said ncclInProgress.
void wait_until_ready(ncclComm_t comm, const char* operation, const StopWaiting& stop_waiting);

}  // namespace ddp::detail
