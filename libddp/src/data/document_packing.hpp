// SPDX-License-Identifier: Apache-2.0
// Which documents share a row: a pure function, free of Torch.
#pragma once

#include <cstdint>
#include <vector>

namespace ddp::detail {

/// Row r holds the items items[begin[r]] .. items[begin[r + 1] - 1].
struct PackedRows {
  std::vector<int64_t> begin;
  std::vector<int64_t> items;
};

/// Best-fit decreasing: longest item first, each into the fullest row with room for it (at most
/// 11/9 of the fewest rows possible: Johnson, 1973). Items of a row ascend, rows ascend by their
/// first item, and equal input gives equal rows. Lengths are 1 .. capacity. Time n log(capacity).
PackedRows pack_best_fit(const std::vector<int32_t>& lengths, int64_t capacity);

}  // namespace ddp::detail
