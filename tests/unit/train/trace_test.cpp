// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>

#include <map>
#include <random>
#include <thread>

#include "core/log/trace_recorder.hpp"
#include "ddp/detail/trace_scope.hpp"
#include "support/catch.hpp"
#include "train/trace/trace_merge.hpp"
#include "unit/train/thread_control_plane.hpp"

using namespace ddp::detail;
using ddp::TraceEvent;
using ddp::TraceRecorder;
using ddp::TraceScope;

namespace {

// A device whose mark n is at time 1000 n.
struct FakeDevice : ddp::TraceDevice {
  uint64_t mark(void*) override { return ++marks; }
  int64_t resolve_ns(uint64_t mark) override { return static_cast<int64_t>(1000 * mark); }
  std::atomic<uint64_t> marks = 0;
};

}  // namespace

TEST_CASE("scopes are recorded only while a recorder is active") {
  TraceRecorder recorder;
  { TraceScope before("before", "compute"); }
  recorder.start();
  recorder.set_step(5);
  {
    TraceScope outer("outer", "compute");
    TraceScope inner("inner", "compute");
  }
  recorder.stop();
  { TraceScope after("after", "compute"); }
  const auto events = recorder.take();
  REQUIRE(events.size() == 2);
  REQUIRE(events[0].name == "outer");
  REQUIRE(events[0].begin_ns <= events[1].begin_ns);
  REQUIRE(events[0].end_ns >= events[1].end_ns);
  REQUIRE(events[1].step == 5);
  REQUIRE(recorder.take().empty());
}

TEST_CASE("marks of a device become spans when they are taken") {
  TraceRecorder recorder;
  recorder.set_device(std::make_shared<FakeDevice>());
  recorder.start();
  { TraceScope scope("step", "compute"); }  // marks 1, 2
  recorder.add_marked("bucket 0", "reduction", recorder.mark(), recorder.mark());
  recorder.add_marked("no device", "reduction", 0, 0);
  recorder.stop();
  std::map<std::string, TraceEvent> by_track;
  for (const auto& event : recorder.take()) {
    by_track[event.track] = event;
  }
  REQUIRE(by_track.size() == 3);
  REQUIRE(by_track.at("compute (device)").begin_ns == 1000);
  REQUIRE(by_track.at("compute (device)").end_ns == 2000);
  REQUIRE(std::abs(by_track.at("reduction").end_ns - by_track.at("reduction").begin_ns) == 1000);
}

TEST_CASE("a recorder accepts spans of many threads up to its limit") {
  TraceRecorder recorder(1000);
  recorder.start();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (int n = 0; n < 500; ++n) {
        TraceScope scope("work", "loader");
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  REQUIRE(recorder.take().size() == 1000);
  REQUIRE(recorder.num_dropped() == 1000);
}

TEST_CASE("clock offsets are bounded by message times") {
  std::mt19937 random(2);
  for (const int64_t offset : {int64_t{0}, int64_t{5'000'000'000}, int64_t{-70'000'000}}) {
    std::vector<ClockRound> rounds;
    int64_t now = 1'000'000;
    int64_t shortest = INT64_MAX;
    for (int i = 0; i < 16; ++i) {
      const int64_t down = 20'000 + random() % 1'000'000, up = 20'000 + random() % 1'000'000;
      shortest = std::min({shortest, down, up});
      ClockRound round{.sent = now, .received = now + down + offset};
      round.answered = round.received + 500;
      round.gathered = now + down + 500 + up;
      now = round.gathered + 1000;
      rounds.push_back(round);
    }
    const auto estimate = estimate_clock_offset(rounds);
    REQUIRE(std::abs(estimate.offset_ns - offset) <= estimate.error_ns);
    REQUIRE(estimate.error_ns < 500'000);
    REQUIRE(estimate.error_ns >= shortest / 2);
  }
}

TEST_CASE("ranks of one host measure no offset, and rank 0 gathers all events in parts") {
  std::vector<std::vector<TraceEvent>> gathered[3];
  ClockOffset offsets[3];  // Catch's assertions need one thread
  const auto errors = testing::run_ranks(3, [&](ddp::ControlPlane& plane) {
    offsets[plane.rank()] = measure_clock_offset(plane);
    std::vector<TraceEvent> events;
    for (int i = 0; i < 10'000 * plane.rank(); ++i) {  // rank 2 sends more than one part
      events.push_back({"event with a name " + std::to_string(i), "track", i, i + 1, plane.rank()});
    }
    gathered[plane.rank()] = gather_events(plane, events);
  });
  for (const auto& error : errors) {
    REQUIRE(!error);
  }
  for (const auto& offset : offsets) {
    REQUIRE(std::abs(offset.offset_ns) <= offset.error_ns);
  }
  REQUIRE(gathered[1].empty());
  REQUIRE(gathered[0].size() == 3);
  REQUIRE(gathered[0][0].empty());
  REQUIRE(gathered[0][2].size() == 20'000);
  REQUIRE(gathered[0][2][19'999].name == "event with a name 19999");
}

TEST_CASE("the merged trace puts all ranks on rank 0's clock") {
  const std::vector<std::vector<TraceEvent>> events = {
      {{"backward", "compute", 1'000'000, 9'000'000, 3},
       {"bucket 0", "reduction", 2'000'000, 5'000'000, 3},
       {"bucket 1", "reduction", 4'000'000, 8'000'000, 3}},
      {{"backward", "compute", 101'500'000, 108'000'000, 3}}};
  const auto json = nlohmann::json::parse(
      trace_to_json(events, {{}, {.offset_ns = 100'000'000, .error_ns = 20'000}}));
  std::map<std::string, nlohmann::json> spans;
  std::map<std::pair<int, int>, std::string> lines;
  for (const auto& event : json.at("traceEvents")) {
    if (event.at("ph") == "X") {
      spans[event.at("name").get<std::string>() + " " + event.at("pid").dump()] = event;
    } else if (event.at("name") == "thread_name") {
      lines[{event.at("pid").get<int>(), event.at("tid").get<int>()}] = event["args"]["name"];
    }
  }
  REQUIRE(spans.size() == 4);
  REQUIRE(spans["backward 0"]["ts"] == 0.0);
  REQUIRE(spans["backward 1"]["ts"] == 500.0);  // µs
  REQUIRE(spans["backward 1"]["dur"] == 6500.0);
  REQUIRE(spans["bucket 0 0"]["args"]["step"] == 3);
  // Reductions that overlap without nesting get one line each.
  const auto line = [&](const char* span) { return lines[{0, spans[span]["tid"].get<int>()}]; };
  REQUIRE(line("bucket 0 0") == "reduction");
  REQUIRE(line("bucket 1 0") == "reduction 2");
  REQUIRE(json["otherData"]["clock_error_us_by_rank"][1] == 20.0);
}
