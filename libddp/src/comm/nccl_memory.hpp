// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <nccl.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "ddp/core/control_plane.hpp"

namespace ddp::detail {

/// Why the ranks of `control_plane` cannot share symmetric windows; empty: they can. The same text
/// on all ranks. Collective. The current device must be the rank's.
std::string why_no_windows(ControlPlane& control_plane);

/// Memory of ncclMemAlloc, registered with one communicator as a symmetric window. The memory
/// outlives the communicator, its registration does not.
class NcclMemory : public std::enable_shared_from_this<NcclMemory> {
 public:
  NcclMemory(ncclComm_t comm, c10::DeviceIndex device) : device_(device), comm_(comm) {}

  /// uint8 [num_bytes] with num_bytes > 0. Collective: every rank registers at the same place, one
  /// call at a time. The current device must be the communicator's.
  at::Tensor allocate(int64_t num_bytes);
  /// Whether all of it lies in one window.
  bool contains(const void* data, size_t num_bytes);
  /// Before the communicator is destroyed.
  void close();
  /// The communicator was aborted: nothing is deregistered or freed any more.
  void abandon();

 private:
  void free(void* memory);

  const c10::DeviceIndex device_;
  std::atomic<bool> abandoned_{false};
  std::mutex mutex_;  // never held while peers or the device are waited for, which only abort ends
  ncclComm_t comm_;
  struct Window {
    ncclWindow_t handle;
    size_t num_bytes;
  };
  std::map<const char*, Window> windows_;  // by address
};

}  // namespace ddp::detail
