// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/tap_kernels.hpp"

namespace ddp::ops::detail {

/// A filter's gradient from the sums of parts of the pixels: partial [splits, filters, size, size,
/// channels] added up over `splits`, always in the same order, and written or added to `filter`,
/// whose numbers are a multiple of four.
cudaError_t launch_sum_parts(const float* partial, int splits, int size, const TapFilter& filter,
                             bool accumulates, cudaStream_t stream);

}  // namespace ddp::ops::detail
