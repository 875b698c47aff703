// SPDX-License-Identifier: Apache-2.0
// What a rank's report keeps within its limits, and the file of all reports.
#include "core/control/doctor/rank_report.hpp"

#include <algorithm>

#include "core/control/doctor/job_report.hpp"
#include "core/control/wire/control_channel.hpp"
#include "core/control/wire/message_codec.hpp"
#include "support/catch.hpp"
#include "unit/core/doctor/evidence.hpp"

namespace ddp::test {
namespace {

using detail::CollectiveEntry;
using detail::diagnose;
using detail::RankReport;

TEST_CASE("doctor: a report travels whole, and within its limits", "[locale]") {
  auto report = *waiting().report;
  report.cpu_percent = 97;
  report.histories[0].graphs = replaying(1, 5, 2).report->histories[0].graphs;
  const auto bytes = detail::encode_report(report);
  REQUIRE(detail::try_decode_message<RankReport>(bytes) == report);
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    REQUIRE_FALSE(detail::try_decode_message<RankReport>(bytes.substr(0, size)));
  }
  // The largest report that a program can cause.
  const std::string text(5000, 'x');
  RankReport large;
  large.position.where = text;
  for (std::size_t i = 0; i < 2 * detail::kMaxPositionGroups; ++i) {
    large.position.groups.push_back({.id = text, .operation = text, .label = text});
    auto& history = large.histories.emplace_back();
    history.collectives.resize(i < 4 ? 200 : 1, {.operation = text, .label = text, .dtype = text});
  }
  large.histories[0].collectives.back().number = 7;
  large.histories[1].graphs.resize(20, {.nodes = large.histories[1].collectives});
  const auto sent = detail::encode_report(large);
  REQUIRE(sent.size() <= detail::kMaxPayloadBytes);
  const auto read = detail::try_decode_message<RankReport>(sent);
  REQUIRE(read);
  CHECK(read->position.groups.size() == detail::kMaxPositionGroups);
  CHECK_FALSE(read->histories[0].collectives.empty());
  CHECK(read->histories[0].collectives.back().number == 7);  // the newest
  REQUIRE(detail::encode_report(*read) == sent);             // cut once
}

TEST_CASE("doctor: a report keeps the first pending collective of each list") {
  const auto list = [](uint64_t num_ended, uint64_t num_pending) {
    std::vector<CollectiveEntry> entries;
    for (uint64_t number = 1; number <= num_ended + num_pending; ++number) {
      entries.push_back(number <= num_ended ? ended(number) : pending(number));
    }
    return entries;
  };
  const auto has = [](const std::vector<CollectiveEntry>& entries, uint64_t number) {
    return std::any_of(entries.begin(), entries.end(),
                       [&](const auto& entry) { return entry.number == number; });
  };
  // 100 buckets are pending, and a graph of 111 nodes.
  RankReport report;
  report.position.groups.resize(5);
  report.histories.resize(5);
  report.histories[0].collectives = list(20, 100);
  report.histories[0].graphs = {{.waited_ms = 31'000, .nodes = list(30, 81)}};
  detail::cut_to_limits(report);
  auto& first = report.histories[0];
  CHECK(first.collectives.size() == detail::kMaxHistoryEntries);
  CHECK((has(first.collectives, 21) && has(first.collectives, 20) && has(first.collectives, 14)));
  CHECK((has(first.collectives, 120) && !has(first.collectives, 30)));
  CHECK((has(first.graphs[0].nodes, 31) && has(first.graphs[0].nodes, 111)));
  // Five full communicators, and the graph is in the last.
  for (auto& history : report.histories) {
    history = {list(30, 34), {}};
  }
  report.histories[4].graphs = {{.waited_ms = 31'000, .nodes = list(30, 81)}};
  detail::cut_to_limits(report);
  std::size_t total = 0;
  for (const auto& history : report.histories) {
    CHECK((has(history.collectives, 31) && has(history.collectives, 64)));
    total += history.collectives.size();
  }
  CHECK(has(report.histories[4].graphs[0].nodes, 31));
  CHECK(total + report.histories[4].graphs[0].nodes.size() <= detail::kMaxReportEntries);
  CHECK(total > 200);
  // The rank waits in 21, although 100 are pending.
  auto many = rank_with(list(20, 100));
  detail::cut_to_limits(*many.report);
  CHECK_THAT(diagnose({many, rank_with(list(20, 0))}).text, Catch::Contains("all_reduce #21 ("));
}

TEST_CASE("doctor: texts are cut between characters") {
  std::string text = "ab…";
  detail::cut_text(text, 4);
  CHECK(text == "ab");
  text = "ab…";
  detail::cut_text(text, 5);
  CHECK(text == "ab…");
  detail::cut_text(text, 0);
  CHECK(text.empty());
}

TEST_CASE("doctor: the file of a report has every rank", "[locale]") {
  detail::JobReport report{.evidence = {waiting(), silent("node2"), replaying(0, 57, 1)},
                           .cause = std::nullopt,
                           .verdict = {}};
  report.evidence[1].process_state = 'T';
  report.evidence[1].host = "bad \xff host";
  report.verdict = diagnose(report.evidence);
  const auto text = detail::to_json(report);
  for (const auto* part :
       {"\"reason\": \"request\"", "\"kind\": \"stopped process\"", "\"certain\": false",
        "\"process_state\": \"T\"", "\"answered\": false", "\"silent_ms\": 8100",
        "\"operation\": \"all_reduce (sum of 8 Float, 32 bytes)\"",
        "\"label\": \"bucket 4: conv2.weight … bn1.bias\"", "\"state\": \"started\"",
        "\"enqueued_ms\": 31400", "\"graph\": 0", "\"replays\": 57", "\"waited_ms\": 31000"}) {
    CHECK_THAT(text, Catch::Contains(part));
  }
}

}  // namespace
}  // namespace ddp::test
