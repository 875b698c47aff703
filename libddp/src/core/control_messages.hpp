// SPDX-License-Identifier: Apache-2.0
// Messages of control-plane collectives and exchanges: what each rank gives, and the result.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace ddp::detail {

enum class CollectiveKind : uint8_t { Broadcast, AllGather, Gather, Barrier, Close };
const char* to_string(CollectiveKind kind);

struct Contribution {
  uint64_t sequence = 0;
  CollectiveKind kind = CollectiveKind::Barrier;
  uint32_t root = 0;
  std::string activity;  ///< the caller's activity, see ActivityScope
  std::string value;
};

/// Part of a collective's result: as many values as fit into one frame.
struct ResultPart {
  uint64_t sequence = 0;
  uint32_t first = 0;
  uint32_t num_values = 0;  ///< in the whole result
  std::vector<std::string> values;
};

std::string encode_contribution(const Contribution& contribution);
bool decode_contribution(std::string_view bytes, Contribution& contribution);
/// Packs `values` into as few messages as the frame limit allows, at least one.
std::vector<std::string> encode_result(uint64_t sequence,
                                       const std::vector<std::string_view>& values);
bool decode_result(std::string_view bytes, uint32_t world_size, ResultPart& part);

/// One rank's value in an exchange among `num_ranks` ranks.
struct ExchangeValue {
  uint64_t key = 0;
  uint32_t num_ranks = 0;
  std::string value;
};

/// All values of an exchange, by rank of the job.
struct ExchangeResult {
  uint64_t key = 0;
  std::map<int, std::string> values;
};

std::string encode_exchange(const ExchangeValue& value);
/// Also refuses a value over the limit of an exchange.
bool decode_exchange(std::string_view bytes, ExchangeValue& value);
std::string encode_exchanged(const ExchangeResult& result);
bool decode_exchanged(std::string_view bytes, ExchangeResult& result);

}  // namespace ddp::detail
