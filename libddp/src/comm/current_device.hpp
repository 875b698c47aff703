// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <optional>

#include "comm/cuda_check.hpp"

namespace ddp::detail {

/// A CUDAGuard only if another device is current. A guard's destructor always queries the driver's
/// contexts, which is a measurable cost for small collectives.
class CurrentDevice {
 public:
  explicit CurrentDevice(c10::DeviceIndex device) {
    int current = -1;
    check_cuda(cudaGetDevice(&current), "cudaGetDevice");
    if (current != device) {
      guard_.emplace(device);
    }
  }

 private:
  std::optional<c10::cuda::CUDAGuard> guard_;
};

}  // namespace ddp::detail
