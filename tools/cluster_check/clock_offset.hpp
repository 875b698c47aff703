// SPDX-License-Identifier: Apache-2.0
// How far the clocks of two nodes differ, from barriers alone.
#pragma once

#include <cstdint>
#include <vector>

namespace cluster_check {

/// Milliseconds that a rank's clock is at least and at most ahead of rank 0's.
struct ClockOffset {
  double low, high;

  /// The least difference that the bounds allow, without its sign.
  double least() const { return low > 0 ? low : high < 0 ? -high : 0; }
};

/// `own` and `root` hold the microseconds on each clock before and after each of several barriers.
ClockOffset bound_offset(const std::vector<int64_t>& own, const std::vector<int64_t>& root);

}  // namespace cluster_check
