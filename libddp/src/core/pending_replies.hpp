// SPDX-License-Identifier: Apache-2.0
// Rank 0's answers that this rank's threads wait for: results of collectives and of exchanges.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/control_messages.hpp"

namespace ddp::detail {

/// The owner's mutex guards it.
class PendingReplies {
 public:
  /// The number of this rank's next collective. Every rank counts its own.
  uint64_t next_sequence() { return next_sequence_++; }

  /// Returns whether the result is complete.
  bool add_result(ResultPart part) {
    auto& result = results_[part.sequence];
    result.values.resize(part.num_values);
    std::move(part.values.begin(), part.values.end(),
              result.values.begin() + static_cast<std::ptrdiff_t>(part.first));
    result.num_arrived += static_cast<uint32_t>(part.values.size());
    return result.num_arrived == part.num_values;
  }
  bool has_result(uint64_t sequence) const {
    const auto found = results_.find(sequence);
    return found != results_.end() && found->second.num_arrived == found->second.values.size();
  }
  std::vector<std::string> take_result(uint64_t sequence) {
    return std::move(results_.extract(sequence).mapped().values);
  }

  void add_exchanged(uint64_t key, std::map<int, std::string> values) {
    exchanged_[key] = std::move(values);
  }
  bool has_exchanged(uint64_t key) const { return exchanged_.contains(key); }
  std::map<int, std::string> take_exchanged(uint64_t key) {
    return std::move(exchanged_.extract(key).mapped());
  }

 private:
  struct PartialResult {
    std::vector<std::string> values;
    uint32_t num_arrived = 0;
  };

  uint64_t next_sequence_ = 0;
  std::map<uint64_t, PartialResult> results_;
  std::map<uint64_t, std::map<int, std::string>> exchanged_;  // by key, then rank
};

}  // namespace ddp::detail
