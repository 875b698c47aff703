// SPDX-License-Identifier: Apache-2.0
// How long an all-reduce takes, by size and algorithm, and what follows from it. Torch-free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddp {

enum class AllReduceAlgorithm {
  Ring,       ///< NCCL's own choice among ring and tree: many thread blocks for large messages
  Symmetric,  ///< one kernel over memory registered as symmetric window: few thread blocks
};
const char* to_string(AllReduceAlgorithm algorithm);

/// Times in microseconds of the slowest rank, the device kept busy (no host in between).
struct AllReduceRow {
  int64_t num_bytes = 0;
  double ring_us = 0;       ///< also of backends that know one algorithm only
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

  /// Time of one algorithm: linear between the rows, the first row's below them, the last two rows'
  /// line above. An empty table gives 0.
  double microseconds(int64_t num_bytes, AllReduceAlgorithm algorithm) const;
  /// Time of what choose() takes.
  double microseconds(int64_t num_bytes, bool overlapped = false) const;

  /// The faster algorithm; for a reduction hidden behind computation the one with few thread
  /// blocks, unless it takes more than 1.5 times as long. `symmetric_extra_us` is what the
  /// symmetric one needs besides (it knows sums only, so a mean is scaled by a kernel behind it).
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
