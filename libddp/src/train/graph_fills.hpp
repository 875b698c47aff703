// SPDX-License-Identifier: Apache-2.0
// A memset node of less than 8 KiB is slow in a CUDA graph: with 100 of them among 200 kernels a
// launch takes the host 389 us instead of 2.6, and the device 1.1 us longer for each (CUDA 13.0,
// H200). Larger ones, and copies of any size, cost what kernels do, which can do the same.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ddp::detail {

/// A kernel node that sets memory as `memset`, of one row, does, behind the `num_after` nodes.
cudaError_t add_fill(cudaGraph_t graph, const cudaGraphNode_t* after, size_t num_after,
                     const cudaMemsetParams& memset, cudaGraphNode_t* node);

/// Puts kernels in the place of a captured graph's small memsets; returns how many. Before it is
/// instantiated.
int64_t replace_small_memsets(cudaGraph_t graph);

}  // namespace ddp::detail
