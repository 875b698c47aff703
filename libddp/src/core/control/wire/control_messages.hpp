// SPDX-License-Identifier: Apache-2.0
// Messages of the rendezvous, of control-plane collectives and of exchanges.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "core/control/plane_interfaces.hpp"
#include "core/control/wire/control_channel.hpp"

namespace ddp::detail {

/// Ends the rendezvous: every rank has joined.
struct Welcome {
  std::vector<std::string> hosts;  ///< by rank

  bool is_valid() const {
    return std::all_of(hosts.begin(), hosts.end(),
                       [](const auto& host) { return host.size() <= kMaxHostBytes; });
  }
  friend auto message_fields(Welcome& welcome) { return std::tie(welcome.hosts); }
};

enum class CollectiveKind : uint8_t { Broadcast, AllGather, Gather, Barrier, Close };
const char* to_string(CollectiveKind kind);

inline constexpr std::size_t kMaxActivityBytes = 64;

/// One rank's call of a collective. CollectiveRounds checks `sequence` and `root`.
struct Contribution {
  uint64_t sequence = 0;
  CollectiveKind kind = CollectiveKind::Barrier;
  uint32_t root = 0;
  std::string activity;  ///< the caller's activity, see ActivityScope
  std::string value;

  bool is_valid() const {
    return kind <= CollectiveKind::Close && activity.size() <= kMaxActivityBytes &&
           value.size() <= kMaxValueBytes;
  }
  friend auto message_fields(Contribution& call) {
    return std::tie(call.sequence, call.kind, call.root, call.activity, call.value);
  }
};

/// Part of a collective's result: as many values as fit into one frame.
struct ResultPart {
  uint64_t sequence = 0;
  uint32_t first = 0;
  uint32_t num_values = 0;  ///< in the whole result
  std::vector<std::string> values;

  bool is_valid() const { return first <= num_values && values.size() <= num_values - first; }
  friend auto message_fields(ResultPart& part) {
    return std::tie(part.sequence, part.first, part.num_values, part.values);
  }
};

/// Packs `values` into as few messages as the frame limit allows, at least one.
std::vector<std::string> encode_result(uint64_t sequence, const std::vector<std::string>& values);

/// One rank's value in an exchange among `num_ranks` ranks. ExchangeRounds checks `num_ranks`.
struct ExchangeValue {
  uint64_t key = 0;
  uint32_t num_ranks = 0;
  std::string value;

  bool is_valid() const { return value.size() <= GroupExchange::kMaxExchangeBytes; }
  friend auto message_fields(ExchangeValue& given) {
    return std::tie(given.key, given.num_ranks, given.value);
  }
};

/// All values of an exchange, by rank of the job.
struct ExchangeResult {
  uint64_t key = 0;
  std::map<int, std::string> values;

  friend auto message_fields(ExchangeResult& result) { return std::tie(result.key, result.values); }
};

}  // namespace ddp::detail
