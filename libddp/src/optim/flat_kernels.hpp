// SPDX-License-Identifier: Apache-2.0
// Passes over a flat optimizer's segments, on the device or on the host. Torch-free.
#pragma once

#include "optim/flat_math.hpp"

#ifdef DDP_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace ddp::detail {

// flat_math.hpp defines an element's operations and their order. The order of sums depends only on
// the sizes, without atomics, so every run gives the same bits.

/// Updates the segments of `gradients`. First counts their updates and computes their trust ratios,
/// if the rule has them.
void host_flat_update(const FlatStep& step, const FlatGradients& gradients);

/// Fills `scan.sums` for the chunks of `gradients`.
void host_flat_scan(const FlatScan& scan, const FlatGradients& gradients);
/// Call after all chunks: fills `scan.found` and `scan.report`.
void host_flat_scan_end(const FlatScan& scan);

#ifdef DDP_HAS_CUDA
// The same, enqueued on `stream`; capturable.

/// SGD: one kernel; Adam: two; LARS: three; LAMB: four.
cudaError_t launch_flat_update(const FlatStep& step, const FlatGradients& gradients,
                               cudaStream_t stream);
cudaError_t launch_flat_scan(const FlatScan& scan, const FlatGradients& gradients,
                             cudaStream_t stream);
cudaError_t launch_flat_scan_end(const FlatScan& scan, cudaStream_t stream);
/// average += share * (weight - average), with at::lerp's formula.
cudaError_t launch_flat_average(const FlatAverage* averages, const FlatChunk* chunks,
                                int num_chunks, float share, cudaStream_t stream);
#endif

}  // namespace ddp::detail
