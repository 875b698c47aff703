// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ddp::detail {

constexpr int kMaxPublished = 16;

/// One step's numbers in memory that the host polls. The device writes `sequence` last.
struct PublishedSlot {
  uint64_t sequence;
  double values[kMaxPublished];
};

}  // namespace ddp::detail
