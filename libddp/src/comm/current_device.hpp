// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <optional>

#include "comm/cuda_check.hpp"

namespace ddp::detail {

/// A CUDAGuard where another device is current, else nothing: a guard's end asks the driver about
/// contexts in every case, which a small collective feels.
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
