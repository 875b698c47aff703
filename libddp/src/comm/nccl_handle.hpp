// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <nccl.h>

#include <functional>
#include <memory>
#include <mutex>

#include "comm/communicator_state.hpp"

namespace ddp::detail {

/// One NCCL communicator until destroy() or abort() ends it; one of them must be called. Any
/// thread. Waits for NCCL's end are bounded.
class NcclHandle {
 public:
  NcclHandle(ncclComm_t comm, c10::DeviceIndex device);
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  c10::DeviceIndex device() const { return device_; }
  const std::shared_ptr<AbortState>& state() const { return state_; }

  /// Throws PeerLostError after an abort. An abort limits its wait for a launching thread, then
  /// frees the handle.
  ncclComm_t get(const char* operation) const;
  /// Throws NCCL's own error of an earlier collective. Returns false after the communicator's end.
  bool poll_async_error() const;

  /// Calls `close`, then frees NCCL's communicator. Does nothing if destroy() or abort() was
  /// called. Returns false if NCCL did not end in time.
  bool destroy(const std::function<void()>& close);
  /// Sets NCCL's abort flag, which unblocks threads inside NCCL. `abandon` runs first, and also if
  /// the communicator has ended.
  void abort(const std::function<void()>& abandon);

 private:
  ncclComm_t take();

  const c10::DeviceIndex device_;
  const std::shared_ptr<AbortState> state_ = std::make_shared<AbortState>();
  int rank_ = 0;
  int world_size_ = 1;
  mutable std::mutex mutex_;
  ncclComm_t comm_;
};

}  // namespace ddp::detail
