// SPDX-License-Identifier: Apache-2.0
// Passes over the segments of a flat optimizer, on the device or on the host. Torch-free.
#pragma once

#include "optim/flat_math.hpp"

#ifdef DDP_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace ddp::detail {

/// Updates the segments of `gradients`; counts their updates first where the rule needs it. The
/// order of operations for an element is flat_math.hpp's.
void host_flat_update(const FlatStep& step, const FlatGradients& gradients);

#ifdef DDP_HAS_CUDA
/// The same by one kernel over all elements, in the order of `stream`, after one small one that
/// counts. Both may be captured.
cudaError_t launch_flat_update(const FlatStep& step, const FlatGradients& gradients,
                               cudaStream_t stream);
#endif

}  // namespace ddp::detail
