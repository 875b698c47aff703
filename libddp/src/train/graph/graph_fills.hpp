// SPDX-License-Identifier: Apache-2.0
// A memset node of less than 8 KiB is slow in a CUDA graph. With 100 of them among 200 kernels a
// launch takes the host 389 us instead of 2.6, and the device 1.1 us longer per memset (CUDA 13.0,
// H200). Larger memsets, and copies of any size, cost as much as kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ddp::detail {

/// Adds a kernel node equivalent to the one-row `memset`, after the `num_after` nodes.
cudaError_t add_fill(cudaGraph_t graph, const cudaGraphNode_t* after, size_t num_after,
                     const cudaMemsetParams& memset, cudaGraphNode_t* node);

/// Replaces a captured graph's small memsets by kernels and returns their number. Call before
/// instantiation.
int64_t replace_small_memsets(cudaGraph_t graph);

}  // namespace ddp::detail
