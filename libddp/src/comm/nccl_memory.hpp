// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <nccl.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "comm/copy_all_reduce.hpp"
#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// Returns why the ranks of `control_plane` cannot share windows; empty if they can.
/// Equal on all ranks. Collective. The rank's device must be current.
std::string why_no_windows(ControlPlane& control_plane);

/// Memory of ncclMemAlloc that each rank reaches on every rank: a window of one communicator. The
/// memory outlives the communicator; the window does not.
class NcclMemory : public std::enable_shared_from_this<NcclMemory> {
 public:
  NcclMemory(ncclComm_t comm, c10::DeviceIndex device) : device_(device), comm_(comm) {}

  /// Returns uint8 [num_bytes]; num_bytes > 0. Collective: every rank registers at the same point,
  /// one call at a time. The communicator's device must be current.
  at::Tensor allocate(int64_t num_bytes);
  /// The range at each rank's address; empty if it does not lie in one window, or NCCL has not
  /// mapped that.
  PeerAddresses find(const void* data, size_t num_bytes);
  /// Call before the communicator is destroyed. The host waits for the device.
  void close();
  /// Call after an abort. Nothing is deregistered or freed afterwards.
  void abandon();

 private:
  void free(void* memory);

  const c10::DeviceIndex device_;
  std::atomic<bool> abandoned_{false};
  std::mutex mutex_;  // never held during waits for peers or the device, which only an abort ends
  ncclComm_t comm_;
  struct Window {
    ncclWindow_t handle;
    size_t num_bytes;
    PeerAddresses addresses;
  };
  std::map<const char*, Window> windows_;  // by address
};

}  // namespace ddp::detail
