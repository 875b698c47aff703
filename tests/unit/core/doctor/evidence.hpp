// SPDX-License-Identifier: Apache-2.0
// What ranks report in the tests of the hang doctor.
#pragma once

#include <chrono>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/control/doctor/diagnosis.hpp"

namespace ddp::test {

inline constexpr const char* kSum = "all_reduce (sum of 8 Float, 32 bytes)";
inline constexpr const char* kBucket = "bucket 4: conv2.weight … bn1.bias";

inline detail::CollectiveEntry call(uint64_t number, detail::CollectiveState state,
                                    const std::string& operation = kSum,
                                    const std::string& label = kBucket) {
  return {.number = number,
          .operation = operation,
          .label = label,
          .dtype = "Float",
          .num_bytes = 32,
          .state = state,
          .enqueued_ms = 31'400};
}
inline detail::CollectiveEntry ended(uint64_t number, const std::string& operation = kSum,
                                     const std::string& label = kBucket) {
  return call(number, detail::CollectiveState::Ended, operation, label);
}
inline detail::CollectiveEntry pending(uint64_t number, const std::string& operation = kSum,
                                       const std::string& label = kBucket) {
  return call(number, detail::CollectiveState::Started, operation, label);
}

// A rank with these collectives of the world; the numbers ascend.
inline detail::RankEvidence rank_with(std::vector<detail::CollectiveEntry> collectives,
                                      const std::string& host = "node") {
  detail::RankEvidence evidence{
      .host = host, .process = 4711, .last = {.step = 5, .where = "forward"}};
  auto& report = evidence.report.emplace();
  report.position.step = 5;
  auto& group = report.position.groups.emplace_back();
  group.id = "world";
  group.num_called = collectives.empty() ? 0 : collectives.back().number;
  for (const auto& entry : collectives) {
    if (!entry.has_ended() && group.pending == 0) {
      group.pending = entry.number;
      group.operation = entry.operation;
    }
  }
  report.histories = {{std::move(collectives), {}}};
  return evidence;
}
inline detail::RankEvidence waiting() {
  return rank_with({ended(11), pending(12)});
}
inline detail::RankEvidence absent(const std::string& where, uint32_t cpu_percent = 3) {
  auto rank = rank_with({ended(11)});
  rank.report->position.where = where;
  rank.report->cpu_percent = cpu_percent;
  return rank;
}
inline detail::RankEvidence silent(const std::string& host) {
  auto rank = waiting();
  rank.host = host;
  rank.report.reset();
  rank.silence = std::chrono::milliseconds(8100);
  return rank;
}
inline detail::RankEvidence in_plane_call(detail::RankEvidence rank,
                                          const detail::PlaneCall& plane_call) {
  rank.call = plane_call;
  rank.num_calls = plane_call.sequence + 1;
  rank.report->position.plane_call = plane_call.sequence + 1;
  return rank;
}

inline detail::RankEvidence replaying(uint64_t graph, uint64_t num_replays, std::size_t num_ended,
                                      const std::string& operation = kSum) {
  auto rank = rank_with({});
  rank.report->position.groups[0].num_called = std::numeric_limits<uint64_t>::max();
  detail::GraphHistory history{.graph = graph, .num_replays = num_replays};
  for (uint64_t node = 1; node <= 3; ++node) {
    history.nodes.push_back(node <= num_ended ? ended(node, operation) : pending(node, operation));
  }
  history.waited_ms = num_ended == 3 ? detail::kUnknownAge : 31'000;
  history.num_ended = 3 * (num_replays - 1) + num_ended;
  rank.report->histories[0].graphs = {history};
  rank.report->histories[0].num_replayed = history.num_ended;
  return rank;
}

}  // namespace ddp::test
