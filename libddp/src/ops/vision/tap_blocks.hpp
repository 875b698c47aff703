// SPDX-License-Identifier: Apache-2.0
// A convolution over few pixels as one product with a dense matrix [out pixel, filter] x [in pixel,
// channel]. Each block of the matrix is the filter's tap between an input and an output pixel, or
// zero.
#pragma once

#include <cstdint>

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

}  // namespace ddp::ops::detail
