// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/collective_progress.hpp"

#include <array>
#include <string>
#include <vector>

#include "ddp/core/error.hpp"
#include "support/catch.hpp"

namespace {

using ddp::detail::CapturedCollectives;
using ddp::detail::CollectiveRecord;

// Captures collectives; the test replays the graphs.
struct Captures {
  std::array<uint32_t, CapturedCollectives::kNumCounters> counters{};
  CapturedCollectives collectives{counters.data()};
  int64_t sequence = 0;

  CollectiveRecord next(const char* name = "all_reduce") {
    return {name, ++sequence, 8, 32, c10::kFloat};
  }
  // Returns the number of the launch.
  int64_t launch(unsigned long long capture, const char* name = "all_reduce") {
    collectives.begin(capture);
    const auto record = next(name);
    return collectives.end({&record, 1});
  }
};

}  // namespace

TEST_CASE("each capture is a graph of its own") {
  Captures captures;
  CHECK(captures.collectives.empty());
  CHECK(captures.collectives.begin(7) == 0U);
  CHECK_FALSE(captures.collectives.empty());
  CHECK_FALSE(captures.collectives.begin(7));
  CHECK(captures.collectives.begin(9) == 1U);
  CHECK(captures.collectives.lanes().size() == 2);
}

TEST_CASE("waiting for the newest launch counts all uncounted collectives") {
  Captures captures;
  const auto first = captures.launch(7);
  const auto second = captures.launch(7);
  CHECK_FALSE(captures.collectives.count(first));  // the second must be waited for too
  auto count = captures.collectives.count(second);
  REQUIRE(count);
  CHECK(count->graph == 0);
  CHECK(count->number == 2);
  count = captures.collectives.count(second);  // waited for twice
  REQUIRE(count);
  CHECK(count->number == 0);
  const auto third = captures.launch(7);
  CHECK(captures.collectives.count(third)->number == 1);

  const auto other = captures.launch(9);
  CHECK(captures.collectives.count(other)->graph == 1);
  CHECK(captures.collectives.number_eager() == other + 1);
  CHECK_FALSE(captures.collectives.count(other));
}

TEST_CASE("a graph's lane advances with its replays") {
  Captures captures;
  for (int i = 0; i < 3; ++i) {
    captures.launch(7);
  }
  captures.launch(9);
  auto lanes = captures.collectives.lanes();
  CHECK(lanes[0].enqueued == 0);  // captured, not run
  captures.counters[CapturedCollectives::started_of(0)] = 2;
  captures.counters[CapturedCollectives::ended_of(0)] = 4;
  captures.counters[CapturedCollectives::started_of(1)] = 5;
  captures.counters[CapturedCollectives::ended_of(1)] = 5;
  lanes = captures.collectives.lanes();
  CHECK(lanes[0].enqueued == 6);
  CHECK(lanes[0].completed == 4);
  CHECK(lanes[1].enqueued == 5);
  CHECK(lanes[1].completed == 5);

  captures.counters[CapturedCollectives::started_of(0)] = 1431655766;  // 3 of it: 2 after 2^32
  captures.counters[CapturedCollectives::ended_of(0)] = UINT32_MAX;
  lanes = captures.collectives.lanes();
  CHECK(lanes[0].enqueued - lanes[0].completed == 3);
}

TEST_CASE("a stopped graph names the collectives of one count") {
  Captures captures;
  captures.launch(7, "broadcast");
  captures.collectives.count(captures.sequence);
  captures.launch(7, "all_reduce");
  captures.launch(7, "all_gather");
  captures.collectives.count(captures.sequence);
  const auto& collectives = captures.collectives;
  CHECK(collectives.describe(0, {6, 3}) ==
        "broadcast #1 (8 Float, 32 bytes), collective 1 of 3 captured in a CUDA graph");
  CHECK(collectives.describe(0, {6, 4}) ==
        "one of all_reduce #2 (8 Float, 32 bytes) to all_gather #3 (8 Float, 32 bytes), collective "
        "2 to 3 of 3 captured in a CUDA graph");
}

TEST_CASE("history: graphs that run, and since when they make no progress") {
  using ddp::detail::CollectiveState;
  using namespace std::chrono_literals;
  Captures captures;
  captures.launch(7);
  captures.launch(7, "broadcast");
  captures.launch(9);
  auto& counters = captures.counters;
  auto now = CapturedCollectives::TimePoint{} + 1h;
  counters[CapturedCollectives::started_of(0)] = 5;
  counters[CapturedCollectives::ended_of(0)] = 9;
  captures.collectives.history(now);
  auto history = captures.collectives.history(now += 2s);
  REQUIRE(history.size() == 1);  // the other graph has not run
  CHECK(history[0].graph == 0);
  CHECK(history[0].num_replays == 5);
  CHECK(history[0].waited_ms == 2000);
  REQUIRE(history[0].nodes.size() == 2);
  CHECK(history[0].nodes[0].state == CollectiveState::Ended);
  CHECK(history[0].nodes[1].state == CollectiveState::Enqueued);
  CHECK(history[0].nodes[1].number == 2);
  CHECK(history[0].nodes[1].operation == "broadcast (8 Float)");

  counters[CapturedCollectives::ended_of(0)] = 10;
  history = captures.collectives.history(now += 1s);
  REQUIRE(history.size() == 1);
  CHECK_FALSE(history[0].is_pending());
  CHECK(history[0].nodes[1].state == CollectiveState::Ended);

  counters[CapturedCollectives::started_of(1)] = 1;
  history = captures.collectives.history(now += 1s);
  REQUIRE(history.size() == 1);  // the graph that ran last
  CHECK(history[0].graph == 1);
  CHECK(history[0].waited_ms == 0);
  CHECK(captures.collectives.num_ended() == 10);  // of all graphs
}

TEST_CASE("counts are held until they are released") {
  Captures captures;
  auto& collectives = captures.collectives;
  CHECK_FALSE(collectives.hold_count());
  CHECK_FALSE(collectives.release_counts());
  collectives.hold_counts();
  CHECK_FALSE(collectives.release_counts());  // none was held
  collectives.hold_counts();
  CHECK(collectives.hold_count());
  CHECK(collectives.release_counts());
  CHECK_FALSE(collectives.release_counts());
  CHECK_FALSE(collectives.hold_count());

  collectives.hold_counts();
  CHECK(collectives.hold_count());
  collectives.hold_counts();  // the first capture was broken off
  CHECK_FALSE(collectives.release_counts());
}

TEST_CASE("graphs beyond the counters are refused") {
  Captures captures;
  for (size_t i = 0; i < CapturedCollectives::kMaxGraphs; ++i) {
    captures.launch(i + 1);
  }
  CHECK_THROWS_AS(captures.collectives.begin(5000), ddp::SettingsError);
  CHECK(captures.collectives.lanes().size() == CapturedCollectives::kMaxGraphs);
}
