// SPDX-License-Identifier: Apache-2.0
// All-reduce times by size. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddp {

/// The time of the slowest rank in microseconds, measured on a busy device without host gaps.
struct AllReduceRow {
  int64_t num_bytes = 0;
  double us = 0;
  bool operator==(const AllReduceRow&) const = default;
};

class AllReduceTable {
 public:
  AllReduceTable() = default;
  /// `rows` by ascending, distinct sizes.
  explicit AllReduceTable(std::vector<AllReduceRow> rows);

  const std::vector<AllReduceRow>& rows() const { return rows_; }
  bool empty() const { return rows_.empty(); }

  /// Interpolates linearly between rows and extrapolates from the last two. Sizes below the first
  /// row take its time. An empty table gives 0.
  double microseconds(int64_t num_bytes) const;

  /// [[bytes, us], …]
  std::string to_json() const;
  /// Throws ReadError. A row of an earlier version has a third number, which is not used.
  static AllReduceTable from_json(const std::string& json);

 private:
  std::vector<AllReduceRow> rows_;
};

}  // namespace ddp
