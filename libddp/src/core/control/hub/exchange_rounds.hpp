// SPDX-License-Identifier: Apache-2.0
// Exchanges in progress, on rank 0: which ranks have given their values (see GroupExchange).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/control/wire/control_messages.hpp"
#include "ddp/core/error.hpp"
#include "ddp/core/membership.hpp"

namespace ddp::detail {

/// The owner's mutex guards it.
class ExchangeRounds {
 public:
  /// Each waiting thread of a rank holds one value.
  static constexpr std::size_t kMaxPending = 1024;

  explicit ExchangeRounds(const Membership& membership)
      : world_size_(static_cast<uint32_t>(membership.world_size)),
        num_pending_(static_cast<std::size_t>(membership.world_size)) {}

  /// Why no rank of this library would send this value now; empty if one would.
  std::string why_invalid(int rank, const ExchangeValue& given) const {
    if (given.num_ranks < 1 || given.num_ranks > world_size_) {
      return concat("exchanges a value among ", given.num_ranks, " ranks in a job of ",
                    world_size_);
    }
    if (num_pending_[static_cast<std::size_t>(rank)] >= kMaxPending) {
      return concat("waits for more than ", kMaxPending, " exchanges");
    }
    const auto found = rounds_.find(given.key);
    if (found == rounds_.end()) {
      return {};
    }
    if (found->second.num_ranks != given.num_ranks) {
      return concat("exchanges a value among ", given.num_ranks, " ranks, another rank among ",
                    found->second.num_ranks);
    }
    return found->second.values.contains(rank) ? "gave two values to one exchange" : "";
  }

  /// Returns the result once all ranks of the exchange have given a value.
  std::optional<ExchangeResult> add(int rank, ExchangeValue given) {
    auto& round = rounds_[given.key];
    round.num_ranks = given.num_ranks;
    ++num_pending_[static_cast<std::size_t>(rank)];
    round.values[rank] = std::move(given.value);
    if (round.values.size() < round.num_ranks) {
      return std::nullopt;
    }
    ExchangeResult result{given.key, std::move(rounds_.extract(given.key).mapped().values)};
    for (const auto& entry : result.values) {
      --num_pending_[static_cast<std::size_t>(entry.first)];
    }
    return result;
  }

 private:
  struct Round {
    uint32_t num_ranks = 0;
    std::map<int, std::string> values;  // by rank
  };

  const uint32_t world_size_;
  std::map<uint64_t, Round> rounds_;      // by key
  std::vector<std::size_t> num_pending_;  // by rank
};

}  // namespace ddp::detail
