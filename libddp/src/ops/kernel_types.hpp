// SPDX-License-Identifier: Apache-2.0
// Element types for kernel launchers: a .cu file must not include Torch headers.
#pragma once

#include <cuda_runtime_api.h>

namespace ddp::ops::detail {

enum class Element { Float32, Bfloat16, Float16, UInt8 };

}  // namespace ddp::ops::detail
