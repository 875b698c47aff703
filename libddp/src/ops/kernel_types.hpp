// SPDX-License-Identifier: Apache-2.0
// Element types as kernels' launchers take them: no Torch header may be seen by a .cu file.
#pragma once

#include <cuda_runtime_api.h>

namespace ddp::ops::detail {

enum class Element { Float32, Bfloat16, Float16, UInt8 };

}  // namespace ddp::ops::detail
