// SPDX-License-Identifier: Apache-2.0
// Turns a sum over ranks into a mean after the collective.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ddp::detail {

enum class ScaleDtype { Float, BFloat16 };

/// data[i] *= factor, computed in float and rounded once. On compute capability 9 and above its
/// blocks start before the previous kernel on `stream` has ended.
cudaError_t launch_scale(void* data, int64_t count, ScaleDtype dtype, float factor,
                         cudaStream_t stream);

}  // namespace ddp::detail
