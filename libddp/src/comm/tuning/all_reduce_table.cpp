// SPDX-License-Identifier: Apache-2.0
#include "comm/tuning/all_reduce_table.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "ddp/core/error.hpp"

namespace ddp {
namespace {

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
    if (!(row.us > 0) || !std::isfinite(row.us)) {
      fail(concat("the time of ", row.num_bytes, " bytes must be a positive number"));
    }
  }
}

}  // namespace

AllReduceTable::AllReduceTable(std::vector<AllReduceRow> rows) : rows_(std::move(rows)) {
  check(rows_);
}

double AllReduceTable::microseconds(int64_t num_bytes) const {
  if (rows_.empty()) {
    return 0;
  }
  if (rows_.size() == 1 || num_bytes <= rows_.front().num_bytes) {
    return rows_.front().us;
  }
  auto right = std::upper_bound(
      rows_.begin(), rows_.end(), num_bytes,
      [](int64_t bytes, const AllReduceRow& row) { return bytes < row.num_bytes; });
  if (right == rows_.end()) {
    --right;
  }
  const auto& left = *(right - 1);
  const double slope =
      (right->us - left.us) / static_cast<double>(right->num_bytes - left.num_bytes);
  // A noisy table may fall towards its end. More bytes are never faster.
  return left.us + std::max(0.0, slope) * static_cast<double>(num_bytes - left.num_bytes);
}

std::string AllReduceTable::to_json() const {
  auto json = nlohmann::json::array();
  for (const auto& row : rows_) {
    json.push_back({row.num_bytes, row.us});
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
    if (!row.is_array() || row.size() < 2 || row.size() > 3 || !row[0].is_number_integer() ||
        !row[1].is_number()) {
      fail("each row is [bytes, us]");
    }
    rows.push_back({row[0].get<int64_t>(), row[1].get<double>()});
  }
  return AllReduceTable(std::move(rows));
}

}  // namespace ddp
