// SPDX-License-Identifier: Apache-2.0
// All-reduce times by size and algorithm, and the choice of an algorithm from them. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddp {

enum class AllReduceAlgorithm {
  Ring,       ///< NCCL chooses ring or tree: many thread blocks for large messages
  Symmetric,  ///< one kernel over a registered symmetric window: few thread blocks
};
const char* to_string(AllReduceAlgorithm algorithm);

/// Times of the slowest rank in microseconds, measured on a busy device without host gaps.
struct AllReduceRow {
  int64_t num_bytes = 0;
  double ring_us = 0;       ///< also holds the time of backends with a single algorithm
  double symmetric_us = 0;  ///< 0: not available
  bool operator==(const AllReduceRow&) const = default;
};

class AllReduceTable {
 public:
  AllReduceTable() = default;
  /// `rows` by ascending, distinct sizes.
  explicit AllReduceTable(std::vector<AllReduceRow> rows);

  const std::vector<AllReduceRow>& rows() const { return rows_; }
  bool empty() const { return rows_.empty(); }
  bool has_symmetric() const;

  /// Time of one algorithm. Interpolates linearly between rows and extrapolates from the last two.
  /// Sizes below the first row take its time. An empty table gives 0.
  double microseconds(int64_t num_bytes, AllReduceAlgorithm algorithm) const;
  /// Time of the algorithm that choose() returns.
  double microseconds(int64_t num_bytes, bool overlapped = false) const;

  /// Returns the faster algorithm. An overlapped reduction gets the one with few thread blocks
  /// unless that takes over 1.5 times as long. `symmetric_extra_us` is the extra cost of Symmetric:
  /// it only sums, so a mean needs a scaling kernel.
  AllReduceAlgorithm choose(int64_t num_bytes, bool overlapped,
                            double symmetric_extra_us = 0) const;

  /// [[bytes, ring us, symmetric us], …]
  std::string to_json() const;
  /// Throws ReadError.
  static AllReduceTable from_json(const std::string& json);

 private:
  std::vector<AllReduceRow> rows_;
};

}  // namespace ddp
