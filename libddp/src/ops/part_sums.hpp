// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/vision/tap_kernels.hpp"

namespace ddp::ops::detail {

/// Adds partial sums of a filter's gradient: partial [splits, filters, size, size, channels] is
/// summed over `splits` in a fixed order. The result is written or added to `filter`, whose number
/// of elements is a multiple of four.
cudaError_t launch_sum_parts(const float* partial, int splits, int size, const TapFilter& filter,
                             bool accumulates, cudaStream_t stream);

}  // namespace ddp::ops::detail
