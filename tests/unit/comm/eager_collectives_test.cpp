// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/collective_progress.hpp"

#include <vector>

#include "support/catch.hpp"

namespace {

using namespace std::chrono_literals;
using ddp::detail::CollectiveRecord;
using ddp::detail::EagerCollectives;
using ddp::detail::LaneProgress;

const auto kStart = EagerCollectives::TimePoint{} + 1h;

// Launches collectives; the test writes the marks.
struct Launches {
  uint32_t completed = 0;
  EagerCollectives collectives{&completed};
  int64_t sequence = 0;

  CollectiveRecord begin(const char* name = "all_reduce") {
    const CollectiveRecord record{name, ++sequence, 8, 32, c10::kFloat};
    collectives.begin({&record, 1});
    return record;
  }
  CollectiveRecord launch(const char* name = "all_reduce") {
    const auto record = begin(name);
    collectives.end(kStart);
    return record;
  }
  // The device reached the mark.
  void complete_mark() {
    const auto mark = collectives.begin_mark(kStart);
    REQUIRE(mark);
    completed = static_cast<uint32_t>(mark->value);
  }
  bool is_at(uint64_t enqueued, uint64_t done) const {
    const auto lane = collectives.lane();
    return lane.enqueued == enqueued && lane.completed == done;
  }
};

}  // namespace

TEST_CASE("eager collectives are watched from their mark on") {
  Launches launches;
  CHECK_FALSE(launches.collectives.mark_is_due());
  CHECK_FALSE(launches.collectives.begin_mark(kStart));
  launches.launch();
  launches.launch();
  CHECK(launches.is_at(0, 0));  // no mark yet
  CHECK(launches.collectives.mark_is_due());
  const auto mark = launches.collectives.begin_mark(kStart);
  REQUIRE(mark);
  CHECK(mark->value == 2);
  CHECK_FALSE(launches.collectives.mark_is_due());
  CHECK_FALSE(launches.collectives.begin_mark(kStart));
  CHECK(launches.is_at(2, 0));
  launches.completed = 2;
  CHECK(launches.is_at(2, 2));
}

TEST_CASE("a launch inside NCCL is watched, because it may wait for a peer") {
  Launches launches;
  launches.launch();
  launches.complete_mark();
  launches.begin();
  CHECK(launches.is_at(2, 1));
}

TEST_CASE("a launch asks for a mark if the last one is 1 ms old") {
  Launches launches;
  launches.begin();
  CHECK(launches.collectives.end(kStart));
  CHECK(launches.collectives.begin_mark(kStart));
  launches.begin();
  CHECK_FALSE(launches.collectives.end(kStart + 999us));
  launches.begin();
  CHECK(launches.collectives.end(kStart + 1ms));
}

TEST_CASE("a launch that threw is neither watched nor numbered") {
  Launches launches;
  launches.launch();
  launches.complete_mark();
  launches.begin("broadcast");
  launches.begin("send");
  launches.collectives.cancel();
  CHECK(launches.is_at(1, 1));
  CHECK(launches.collectives.position().num_called == 1);
  launches.launch("barrier");
  CHECK(launches.collectives.begin_mark(kStart)->value == 2);
  CHECK(launches.collectives.position().operation == "barrier (8 Float)");
}

TEST_CASE("a mark that was not written leaves its collectives unwatched and due") {
  Launches launches;
  launches.launch();
  launches.complete_mark();
  launches.launch();
  launches.launch();
  const auto mark = launches.collectives.begin_mark(kStart);
  REQUIRE(mark);
  launches.collectives.cancel_mark(*mark);
  CHECK(launches.is_at(1, 1));
  CHECK(launches.collectives.mark_is_due());
  launches.launch();
  launches.complete_mark();
  CHECK(launches.is_at(4, 4));
}

TEST_CASE("a mark over several collectives names the first and the last") {
  Launches launches;
  const auto alone = launches.launch("broadcast");
  CHECK(launches.collectives.begin_mark(kStart));
  const auto first = launches.launch();
  launches.launch("send");
  const auto last = launches.launch("barrier");
  CHECK(launches.collectives.begin_mark(kStart));
  CHECK(launches.collectives.describe({4, 0}) == alone.to_string());
  CHECK(launches.collectives.describe({4, 1}) ==
        "one of " + first.to_string() + " to " + last.to_string());
  CHECK(first.to_string() == "all_reduce #2 (8 Float, 32 bytes)");
}

TEST_CASE("positions count what all ranks call and name the pending collective") {
  Launches launches;
  launches.launch("send");
  launches.launch("all_gather");
  launches.complete_mark();
  auto position = launches.collectives.position();
  CHECK(position.num_called == 1);
  CHECK(position.pending == 0);
  CHECK(position.operation.empty());
  launches.launch("broadcast");
  launches.launch("all_reduce");
  CHECK(launches.collectives.begin_mark(kStart));
  position = launches.collectives.position();
  CHECK(position.num_called == 3);
  CHECK(position.pending == 3);
  CHECK(position.operation == "all_reduce (8 Float)");
}

TEST_CASE("records of many collectives are reused") {
  Launches launches;
  for (int i = 0; i < 5000; ++i) {
    launches.launch();
    if (i % 100 == 99) {
      launches.complete_mark();
    }
  }
  const auto first = launches.launch("broadcast");
  for (int i = 0; i < 98; ++i) {
    launches.launch();
  }
  const auto last = launches.launch("all_gather");
  CHECK(launches.collectives.begin_mark(kStart));
  CHECK(launches.is_at(5100, 5000));
  CHECK(launches.collectives.describe({5100, 5000}) ==
        "one of " + first.to_string() + " to " + last.to_string());
}

TEST_CASE("history: the newest collectives with their states") {
  Launches launches;
  launches.launch();
  launches.launch("send");
  launches.complete_mark();
  launches.launch("broadcast");
  REQUIRE(launches.collectives.begin_mark(kStart));
  launches.launch("all_gather");
  const auto history = launches.collectives.history();
  REQUIRE(history.size() == 3);  // without send, which not all ranks call
  using ddp::detail::CollectiveState;
  CHECK(history[0].state == CollectiveState::Ended);
  CHECK(history[0].operation == "all_reduce (8 Float)");
  CHECK(history[0].num_bytes == 32);
  CHECK(history[0].dtype == "Float");
  CHECK(history[1].number == 2);
  CHECK(history[1].state == CollectiveState::Enqueued);
  CHECK(history[1].enqueued_ms >= 0);
  CHECK(history[2].state == CollectiveState::Called);  // nothing marks its end

  for (int i = 0; i < 3000; ++i) {
    launches.launch();
  }
  CHECK(launches.collectives.history().back().number == 3003);
}

TEST_CASE("history: of the collectives under one mark only the last is known to be pending") {
  using ddp::detail::CollectiveState;
  Launches launches;
  for (int i = 0; i < 80; ++i) {
    launches.launch();
  }
  launches.complete_mark();
  for (int i = 0; i < 4; ++i) {
    launches.launch("broadcast");
  }
  REQUIRE(launches.collectives.begin_mark(kStart));
  for (int i = 0; i < 100; ++i) {
    launches.launch("all_gather");
  }
  REQUIRE(launches.collectives.begin_mark(kStart));
  const auto history = launches.collectives.history();
  REQUIRE(history.back().number == 184);
  REQUIRE(history.size() == 104 + ddp::detail::kMaxHistoryEntries);
  for (const auto& entry : history) {
    CHECK(entry.state == (entry.number <= 80   ? CollectiveState::Ended
                          : entry.number <= 83 ? CollectiveState::Called
                                               : CollectiveState::Enqueued));
  }
  CHECK(launches.collectives.position().pending == 84);
  // The record of the first pending one was reused.
  for (int i = 0; i < 1024; ++i) {
    launches.launch();
  }
  CHECK(launches.collectives.history().size() == 1024);
  for (const auto& entry : launches.collectives.history()) {
    CHECK(entry.state == CollectiveState::Called);
  }
}

TEST_CASE("a label travels with its collective") {
  uint32_t completed = 0;
  EagerCollectives collectives{&completed};
  const auto label = ddp::detail::make_label("bucket 4: a … b");
  CollectiveRecord record{"all_reduce", 7, 8, 32, c10::kFloat};
  {
    const ddp::detail::LabelScope scope(label);
    record.label = ddp::detail::LabelScope::current();
    CHECK(ddp::detail::LabelScope::trace_name("all_reduce") == "bucket 4: all_reduce");
  }
  CHECK(ddp::detail::LabelScope::current() == nullptr);
  CHECK(ddp::detail::LabelScope::trace_name("all_reduce") == "all_reduce");
  CHECK(record.to_string() == "all_reduce #7 (8 Float, 32 bytes; bucket 4: a … b)");
  collectives.begin({&record, 1});
  const auto position = collectives.position();
  CHECK(position.operation == "all_reduce (8 Float)");  // equal labels are no condition
  CHECK(position.label == "bucket 4: a … b");
  CHECK(collectives.history().front().label == "bucket 4: a … b");
}
