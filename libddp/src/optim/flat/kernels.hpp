// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels behind the passes of passes.hpp, enqueued on `stream`; capturable. Torch-free.
#pragma once

#include "optim/flat/math.hpp"

#ifdef DDP_HAS_CUDA
#include <cuda_runtime_api.h>

namespace ddp::detail {

/// SGD: one kernel; Adam: two; LARS: three; LAMB: four.
cudaError_t launch_flat_update(const FlatStep& step, const FlatGradients& gradients,
                               cudaStream_t stream);
cudaError_t launch_flat_scan(const FlatScan& scan, const FlatGradients& gradients,
                             cudaStream_t stream);
cudaError_t launch_flat_scan_end(const FlatScan& scan, cudaStream_t stream);
cudaError_t launch_flat_average(const FlatAverage* averages, const FlatChunk* chunks,
                                int num_chunks, float share, cudaStream_t stream);

}  // namespace ddp::detail
#endif
