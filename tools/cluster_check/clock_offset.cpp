// SPDX-License-Identifier: Apache-2.0
#include "clock_offset.hpp"

#include <algorithm>

namespace cluster_check {

// Every rank enters a barrier before any rank leaves it. So this rank's time of entry lies before
// rank 0's exit, and rank 0's entry before this rank's exit: each barrier bounds the offset from
// both sides, whatever the network takes.
ClockOffset bound_offset(const std::vector<int64_t>& own, const std::vector<int64_t>& root) {
  int64_t low = INT64_MIN, high = INT64_MAX;
  for (std::size_t enter = 0; enter < own.size(); enter += 2) {
    const std::size_t exit = enter + 1;
    low = std::max(low, own[enter] - root[exit]);
    high = std::min(high, own[exit] - root[enter]);
  }
  return {static_cast<double>(low) / 1000, static_cast<double>(high) / 1000};
}

}  // namespace cluster_check
