// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "ddp/core/error.hpp"

namespace ddp::detail {

/// Throws ddp::Error with the name and text of the CUDA error.
inline void check_cuda(cudaError_t code, const char* what) {
  if (code != cudaSuccess) [[unlikely]] {
    throw Error(ExitCode::UserException,
                concat(what, " failed: ", cudaGetErrorName(code), ": ", cudaGetErrorString(code)));
  }
}

/// Returns the driver's function `name`, null if the driver lacks it. Asks the runtime, so that
/// nothing links against the driver's library.
inline void* find_driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const auto code =
      cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
  if (code != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    cudaGetLastError();  // the caller has a substitute
    return nullptr;
  }
  return function;
}

}  // namespace ddp::detail
