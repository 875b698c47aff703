// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/kernel_types.hpp"
#include "ops/vision/tap_blocks.hpp"

namespace ddp::ops::detail {

/// [filters, channels, 3, 3] with strides in elements.
struct TapFilter {
  void* data;
  Element element;
  int filters, channels;
  int64_t strides[4];
};

/// dense [outs, filters, ins, channels] of bf16 or fp16; channels a multiple of 8.
cudaError_t launch_spread_taps(const TapFilter& filter, const TapBlocks& blocks, void* dense,
                               Element dense_element, cudaStream_t stream);
/// The inverse: each tap is the sum of its blocks (none: zero), written or added to the filter.
cudaError_t launch_fold_taps(const TapFilter& filter, const TapBlocks& blocks, const void* dense,
                             Element dense_element, bool accumulates, cudaStream_t stream);

}  // namespace ddp::ops::detail
