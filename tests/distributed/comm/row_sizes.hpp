// SPDX-License-Identifier: Apache-2.0
// Numbers of rows for messages between all pairs of ranks.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

namespace ddp::test {

using Sizes = std::vector<int64_t>;

/// Rows that `sender` sends to `receiver`: 0, 1 or 2, and another number in each direction.
inline int64_t rows_sent(int64_t sender, int64_t receiver) {
  return (sender + 2 * receiver) % 3;
}

inline int64_t sum_of(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

}  // namespace ddp::test
