// SPDX-License-Identifier: Apache-2.0
// Packs documents into rows: a pure function, independent of Torch.
#pragma once

#include <cstdint>
#include <vector>

namespace models::detail {

/// Row r holds the items items[begin[r]] .. items[begin[r + 1] - 1].
struct PackedRows {
  std::vector<int64_t> begin;
  std::vector<int64_t> items;
};

/// Best-fit decreasing: longest item first, each into the fullest row with enough room (at most
/// 11/9 of the minimal number of rows: Johnson, 1973). Items ascend in a row; rows ascend by their
/// first item. The result is deterministic. Lengths are 1 .. capacity. Time n log(capacity).
PackedRows pack_best_fit(const std::vector<int32_t>& lengths, int64_t capacity);

}  // namespace models::detail
