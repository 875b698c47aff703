// SPDX-License-Identifier: Apache-2.0
// Converts between a 3x3 filter and its dense matrix: kernels on CUDA, else ATen.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/vision/tap_kernels.hpp"

namespace ddp::ops::detail {

/// [filters, channels, 3, 3] -> [outs * filters, ins * channels] of `dtype`.
at::Tensor spread_taps(const at::Tensor& filter, const TapBlocks& blocks, at::ScalarType dtype);

/// target = beta target + the sums of each tap's blocks; target [filters, channels, 3, 3].
void fold_taps(const at::Tensor& dense, const TapBlocks& blocks, const at::Tensor& target,
               double beta);

#ifdef DDP_HAS_CUDA
/// A filter for kernels.
TapFilter filter_view(const at::Tensor& filter);
#endif

}  // namespace ddp::ops::detail
