// SPDX-License-Identifier: Apache-2.0
// Element types for kernel launchers: a .cu file must not include Torch headers.
#pragma once

#include <cuda_runtime_api.h>

namespace ddp::ops::detail {

enum class Element { Float32, Bfloat16, Float16, UInt8 };

/// A contiguous gradient to write (beta 0) or add to (beta 1).
struct GradOut {
  void* data = nullptr;  ///< nullptr: not wanted
  Element element = Element::Float32;
  float beta = 0;
};

}  // namespace ddp::ops::detail
