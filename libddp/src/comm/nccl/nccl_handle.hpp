// SPDX-License-Identifier: Apache-2.0
// NCCL communicators from creation to destruction: every wait is bounded and every code is checked.
#pragma once

#include <c10/core/Device.h>
#include <nccl.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>

#include "comm/communicator_state.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// Throws PeerLostError (SettingsError for a usage error) with the operation's name, NCCL's text
/// and advice. ncclSuccess and ncclInProgress pass.
void check_nccl(ncclResult_t code, ncclComm_t comm, const char* operation);

/// Sets NCCL's abort flag, which unblocks threads inside NCCL, and frees the communicator. Waits at
/// most 5 seconds.
struct NcclAborter {
  void operator()(ncclComm_t comm) const;
  c10::DeviceIndex device = 0;
};
/// A communicator that is aborted unless it is released.
using NcclCommPtr = std::unique_ptr<ncclComm, NcclAborter>;

/// Throws if waiting has become pointless.
using StopWaiting = std::function<void()>;

/// Connects all ranks of `control_plane` on CUDA device `device`. Collective.
///
/// The ranks first connect a non-blocking communicator, so a missing rank causes a timeout, not a
/// hang. Non-blocking communicators start a thread per collective (NCCL 2.28,
/// ncclGroupEndInternal), which costs more than a small collective. So this returns a blocking
/// child, whose collectives the calling thread enqueues.
NcclCommPtr connect_nccl(ControlPlane& control_plane, c10::DeviceIndex device,
                         const CommunicatorOptions& options);

/// Runs ncclCommSplit of a blocking communicator in its own thread. Null for a negative color.
NcclCommPtr split_nccl(ncclComm_t parent, c10::DeviceIndex device, int color, int key,
                       const CommunicatorOptions& options, const StopWaiting& stop_waiting);

/// Place and number of ranks of `comm`, without hosts.
Membership membership_of(ncclComm_t comm, int64_t generation);

/// One NCCL communicator until destroy() or abort() ends it. The destructor aborts it otherwise.
/// Any thread. Waits for NCCL's end are bounded.
class NcclHandle {
 public:
  explicit NcclHandle(NcclCommPtr comm);
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  c10::DeviceIndex device() const { return device_; }
  const std::shared_ptr<AbortState>& state() const { return state_; }

  /// Throws PeerLostError after an abort. An abort limits its wait for a launching thread, then
  /// frees the handle.
  ncclComm_t get(const char* operation) const;
  /// Throws NCCL's own error of an earlier collective. Returns false after the communicator's end.
  bool poll_async_error() const;

  /// Frees NCCL's communicator in another thread. Does nothing if destroy() or abort() was called.
  /// Returns false if NCCL did not end in time.
  bool destroy();
  /// Calls `abandon`, even if the communicator has ended, then aborts.
  void abort(const std::function<void()>& abandon);

 private:
  NcclCommPtr take();

  const c10::DeviceIndex device_;
  const std::shared_ptr<AbortState> state_ = std::make_shared<AbortState>();
  mutable std::mutex mutex_;
  NcclCommPtr comm_;
};

}  // namespace ddp::detail
