// SPDX-License-Identifier: Apache-2.0
// Kernels that run before and after NCCL's. Free of LibTorch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ddp::detail {

/// *total += by; *shown = *total. `total` is device memory, `shown` mapped host memory, because
/// reading host memory over the bus is slow. Counts again in every replay of a captured graph.
cudaError_t launch_counter_add(uint32_t* total, uint32_t* shown, uint32_t by, cudaStream_t stream);

/// *shown = value.
cudaError_t launch_counter_set(uint32_t* shown, uint32_t value, cudaStream_t stream);

/// data[i] *= *factor of `count` elements of bfloat16; turns a sum over ranks into a mean. Computed
/// in float and rounded once. On compute capability 9 and above its blocks start before the
/// previous kernel on `stream` has ended.
cudaError_t launch_scale(void* data, int64_t count, const float* factor, cudaStream_t stream);

}  // namespace ddp::detail
