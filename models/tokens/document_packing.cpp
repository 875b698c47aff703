// SPDX-License-Identifier: Apache-2.0
#include "tokens/document_packing.hpp"

#include <algorithm>
#include <map>
#include <numeric>

#include "ddp/detail/check.hpp"

namespace models::detail {

PackedRows pack_best_fit(const std::vector<int32_t>& lengths, int64_t capacity) {
  const auto num_items = static_cast<int64_t>(lengths.size());
  std::vector<int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
  // Open rows by remaining room; among equal rows the newest is filled first.
  std::map<int64_t, std::vector<int64_t>> rows_by_room;
  std::vector<int64_t> row_of(lengths.size());
  int64_t num_rows = 0;
  for (const int64_t item : order) {
    const int64_t length = lengths[item];
    DDP_CHECK(length >= 1 && length <= capacity, length, " of ", capacity);
    auto fitting = rows_by_room.lower_bound(length);
    int64_t row = num_rows;
    int64_t room = capacity;
    if (fitting == rows_by_room.end()) {
      ++num_rows;
    } else {
      room = fitting->first;
      row = fitting->second.back();
      fitting->second.pop_back();
      if (fitting->second.empty()) {
        rows_by_room.erase(fitting);
      }
    }
    row_of[item] = row;
    if (room > length) {
      rows_by_room[room - length].push_back(row);
    }
  }
  // Rows were opened by length: renumber them by their first item.
  std::vector<int64_t> number(static_cast<size_t>(num_rows), -1);
  PackedRows rows{.begin = std::vector<int64_t>(static_cast<size_t>(num_rows) + 1, 0),
                  .items = std::vector<int64_t>(lengths.size())};
  int64_t next = 0;
  for (int64_t item = 0; item < num_items; ++item) {
    int64_t& row = number[row_of[item]];
    row = row < 0 ? next++ : row;
    row_of[item] = row;
    ++rows.begin[row + 1];
  }
  std::partial_sum(rows.begin.begin(), rows.begin.end(), rows.begin.begin());
  std::vector<int64_t> place(rows.begin.begin(), rows.begin.end() - 1);
  for (int64_t item = 0; item < num_items; ++item) {
    rows.items[place[row_of[item]]++] = item;
  }
  return rows;
}

}  // namespace models::detail
