// SPDX-License-Identifier: Apache-2.0
// Dropout without stored masks: the backward draws the forward's numbers again.
#pragma once

#include <cstdint>

namespace ddp::ops::detail {

/// One call's numbers of a Philox generator, as PyTorch's generator reserves them. While a graph is
/// captured, seed and offset are known only on the device.
struct DropoutDraws {
  uint32_t threshold = 0;  ///< elements whose 16 bits are smaller are zeroed; 0: nothing is drawn
  float scale = 1;         ///< of the others
  uint64_t seed = 0;
  uint64_t offset = 0;
  const int64_t* device_seed = nullptr;    ///< replaces `seed`
  const int64_t* device_offset = nullptr;  ///< is added to `offset`
  int64_t* drawn = nullptr;                ///< [2]: the kernel stores the seed and offset it used
};

/// What the generator advances by for each call: a thread draws four words for eight elements.
inline constexpr uint64_t kDrawsOfThread = 4;

}  // namespace ddp::ops::detail
