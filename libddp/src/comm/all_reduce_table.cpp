// SPDX-License-Identifier: Apache-2.0
#include "comm/all_reduce_table.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "ddp/core/error.hpp"

namespace ddp {
namespace {

// An overlapped reduction may take this much longer: thread blocks taken from the computation cost
// more.
constexpr double kOverlappedMayTake = 1.5;

double time_of(const AllReduceRow& row, AllReduceAlgorithm algorithm) {
  return algorithm == AllReduceAlgorithm::Ring ? row.ring_us : row.symmetric_us;
}

[[noreturn]] void fail(const std::string& why) {
  throw ReadError("the plan's table of all-reduce times is damaged: " + why +
                  "; fix: remove the plan, and it is measured again");
}

void check(const std::vector<AllReduceRow>& rows) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto& row = rows[i];
    if (row.num_bytes <= (i == 0 ? 0 : rows[i - 1].num_bytes)) {
      fail("sizes must ascend");
    }
    if (!(row.ring_us > 0) || !(row.symmetric_us >= 0) || !std::isfinite(row.ring_us) ||
        !std::isfinite(row.symmetric_us)) {
      fail(concat("times of ", row.num_bytes, " bytes must be positive numbers"));
    }
    if ((row.symmetric_us > 0) != (rows[0].symmetric_us > 0)) {
      fail("an algorithm has times for some sizes only");
    }
  }
}

}  // namespace

const char* to_string(AllReduceAlgorithm algorithm) {
  return algorithm == AllReduceAlgorithm::Ring ? "ring" : "symmetric";
}

AllReduceTable::AllReduceTable(std::vector<AllReduceRow> rows) : rows_(std::move(rows)) {
  check(rows_);
}

bool AllReduceTable::has_symmetric() const {
  return !rows_.empty() && rows_.front().symmetric_us > 0;
}

double AllReduceTable::microseconds(int64_t num_bytes, AllReduceAlgorithm algorithm) const {
  if (rows_.empty()) {
    return 0;
  }
  if (rows_.size() == 1 || num_bytes <= rows_.front().num_bytes) {
    return time_of(rows_.front(), algorithm);
  }
  auto right = std::upper_bound(
      rows_.begin(), rows_.end(), num_bytes,
      [](int64_t bytes, const AllReduceRow& row) { return bytes < row.num_bytes; });
  if (right == rows_.end()) {
    --right;
  }
  const auto& left = *(right - 1);
  const double from = time_of(left, algorithm);
  const double slope =
      (time_of(*right, algorithm) - from) / static_cast<double>(right->num_bytes - left.num_bytes);
  // A noisy table may fall towards its end. More bytes are never faster.
  return from + std::max(0.0, slope) * static_cast<double>(num_bytes - left.num_bytes);
}

double AllReduceTable::microseconds(int64_t num_bytes, bool overlapped) const {
  return microseconds(num_bytes, choose(num_bytes, overlapped));
}

AllReduceAlgorithm AllReduceTable::choose(int64_t num_bytes, bool overlapped,
                                          double symmetric_extra_us) const {
  if (!has_symmetric()) {
    return AllReduceAlgorithm::Ring;
  }
  const double ring = microseconds(num_bytes, AllReduceAlgorithm::Ring);
  const double symmetric =
      microseconds(num_bytes, AllReduceAlgorithm::Symmetric) + symmetric_extra_us;
  return symmetric <= ring * (overlapped ? kOverlappedMayTake : 1) ? AllReduceAlgorithm::Symmetric
                                                                   : AllReduceAlgorithm::Ring;
}

std::string AllReduceTable::to_json() const {
  auto json = nlohmann::json::array();
  for (const auto& row : rows_) {
    json.push_back({row.num_bytes, row.ring_us, row.symmetric_us});
  }
  return json.dump();
}

AllReduceTable AllReduceTable::from_json(const std::string& json) {
  const auto parsed = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_array()) {
    fail("a list of rows is expected");
  }
  std::vector<AllReduceRow> rows;
  for (const auto& row : parsed) {
    if (!row.is_array() || row.size() != 3 || !row[0].is_number_integer() || !row[1].is_number() ||
        !row[2].is_number()) {
      fail("each row is [bytes, ring us, symmetric us]");
    }
    rows.push_back({row[0].get<int64_t>(), row[1].get<double>(), row[2].get<double>()});
  }
  return AllReduceTable(std::move(rows));
}

}  // namespace ddp
