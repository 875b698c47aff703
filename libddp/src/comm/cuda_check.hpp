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

}  // namespace ddp::detail
