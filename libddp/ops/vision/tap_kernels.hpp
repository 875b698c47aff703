// SPDX-License-Identifier: Apache-2.0
// A 3x3 convolution over few pixels as one product with a dense matrix [out pixel, filter] x [in
// pixel, channel]. Each block of the matrix is the filter's tap between an input and an output
// pixel, or zero.
#pragma once

#include <cstdint>

#ifdef DDP_HAS_CUDA
#include "ops/kernel_types.hpp"
#endif

namespace ddp::ops::detail {

struct TapBlocks {
  static constexpr int kMaxBlocks = 16;
  int outs = 1, ins = 1;         ///< pixels
  int8_t taps[kMaxBlocks] = {};  ///< [out * ins + in]: row * 3 + column of the filter, -1: zero

  /// 3x3, padding 1, on side x side pixels (1 or 2).
  static constexpr TapBlocks of(int side, int stride) {
    const int out_side = (side - 1) / stride + 1;
    TapBlocks blocks{out_side * out_side, side * side, {}};
    for (int out = 0; out < blocks.outs; ++out) {
      for (int in = 0; in < blocks.ins; ++in) {
        const int row = in / side - out / out_side * stride + 1;
        const int column = in % side - out % out_side * stride + 1;
        const bool exists = row >= 0 && row < 3 && column >= 0 && column < 3;
        blocks.taps[out * blocks.ins + in] = static_cast<int8_t>(exists ? row * 3 + column : -1);
      }
    }
    return blocks;
  }
};

#ifdef DDP_HAS_CUDA

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

#endif

}  // namespace ddp::ops::detail
