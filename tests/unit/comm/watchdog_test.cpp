// SPDX-License-Identifier: Apache-2.0
// Free of LibTorch: also runs under the thread sanitizer.
#include "comm/watchdog.hpp"

#include <atomic>
#include <functional>
#include <memory>

#include "support/catch.hpp"

namespace {

using namespace std::chrono_literals;
using ddp::detail::LaneProgress;
using ddp::detail::StallDetector;

const auto kStart = StallDetector::TimePoint{} + 1h;

}  // namespace

TEST_CASE("a counter that stands for the limit is a stall, and says where it stands") {
  StallDetector detector;
  CHECK_FALSE(detector.check({{3, 2}}, kStart, 1000ms));
  CHECK_FALSE(detector.check({{5, 2}}, kStart + 999ms, 1000ms));  // enqueuing more is not progress
  const auto stall = detector.check({{5, 2}}, kStart + 1000ms, 1000ms);
  REQUIRE(stall);
  CHECK(stall->lane == 0);
  CHECK(stall->progress.completed == 2);
  CHECK(stall->progress.enqueued == 5);
  CHECK(stall->duration == 1000ms);
}

TEST_CASE("progress starts the clock anew") {
  StallDetector detector;
  for (uint64_t i = 0; i < 100; ++i) {  // 90 s in total, never 1 s without progress
    CHECK_FALSE(detector.check({{1000, i}}, kStart + i * 900ms, 1000ms));
  }
  CHECK_FALSE(detector.check({{1000, 99}}, kStart + 99 * 900ms + 999ms, 1000ms));
  CHECK(detector.check({{1000, 99}}, kStart + 99 * 900ms + 1000ms, 1000ms));
}

TEST_CASE("idle time does not count") {
  StallDetector detector;
  CHECK_FALSE(detector.check({{7, 7}}, kStart, 1000ms));
  CHECK_FALSE(detector.check({{7, 7}}, kStart + 1h, 1000ms));  // evaluation, checkpoint, …
  CHECK_FALSE(detector.check({{8, 7}}, kStart + 1h + 1ms, 1000ms));
  CHECK_FALSE(detector.check({{8, 7}}, kStart + 1h + 1000ms, 1000ms));
  CHECK(detector.check({{8, 7}}, kStart + 1h + 1001ms, 1000ms));
}

TEST_CASE("the limit of the moment holds: the first step may take longer") {
  StallDetector detector;
  CHECK_FALSE(detector.check({{1, 0}}, kStart, 30min));
  CHECK_FALSE(detector.check({{1, 0}}, kStart + 29min, 30min));
  CHECK(detector.check({{1, 0}}, kStart + 29min, 10min));
}

TEST_CASE("a suspension of this process is no stall") {
  StallDetector detector(100ms);
  CHECK_FALSE(detector.check({{3, 2}}, kStart, 1000ms));
  CHECK_FALSE(detector.check({{3, 2}}, kStart + 1h, 1000ms));
  for (int i = 1; i < 9; ++i) {
    CHECK_FALSE(detector.check({{3, 2}}, kStart + 1h + i * 100ms, 1000ms));
  }
  CHECK(detector.check({{3, 2}}, kStart + 1h + 900ms, 1000ms));
}

TEST_CASE("a replay that stands is named, not what was enqueued behind it") {
  StallDetector detector;
  CHECK_FALSE(detector.check({{2, 1}, {4, 2}}, kStart, 1000ms));
  const auto stall = detector.check({{2, 1}, {4, 2}}, kStart + 1000ms, 1000ms);
  REQUIRE(stall);
  CHECK(stall->lane == 1);
}

TEST_CASE("graph replays are watched as lanes of their own") {
  StallDetector detector;
  // Lane 0 is done; lane 1 replays a graph of 4 collectives: 3 of 8 have ended.
  CHECK_FALSE(detector.check({{10, 10}, {8, 2}}, kStart, 1000ms));
  CHECK_FALSE(detector.check({{10, 10}, {8, 3}}, kStart + 900ms, 1000ms));
  CHECK_FALSE(detector.check({{10, 10}, {8, 3}}, kStart + 1800ms, 1000ms));
  const auto stall = detector.check({{10, 10}, {8, 3}}, kStart + 1900ms, 1000ms);
  REQUIRE(stall);
  CHECK(stall->lane == 1);
  CHECK(stall->progress.completed == 3);
}

TEST_CASE("a new lane that is idle is no progress and no stall") {
  StallDetector detector;
  CHECK_FALSE(detector.check({{5, 4}}, kStart, 1000ms));
  CHECK_FALSE(detector.check({{5, 4}, {0, 0}}, kStart + 500ms, 1000ms));
  const auto stall = detector.check({{5, 4}, {0, 0}}, kStart + 1000ms, 1000ms);
  REQUIRE(stall);
  CHECK(stall->lane == 0);
}

TEST_CASE("the watchdog's thread reads counters that others move, and fires once") {
  std::atomic<uint64_t> enqueued{0};
  std::atomic<uint64_t> completed{0};
  std::atomic<int> fired{0};
  auto probe = [&, detector = std::make_shared<StallDetector>()] {
    const auto done = completed.load();
    if (detector->check({{enqueued.load(), done}}, std::chrono::steady_clock::now(), 100ms)) {
      ++fired;
      return false;
    }
    return true;
  };
  ddp::detail::Watchdog<std::function<bool()>> watchdog(probe, 2ms);
  for (int i = 0; i < 100; ++i) {  // 200 ms of progress
    ++enqueued;
    std::this_thread::sleep_for(2ms);
    ++completed;
  }
  std::this_thread::sleep_for(150ms);
  CHECK(fired == 0);
  ++enqueued;  // never ends
  const auto begin = std::chrono::steady_clock::now();
  while (fired == 0 && std::chrono::steady_clock::now() - begin < 10s) {
    std::this_thread::sleep_for(1ms);
  }
  CHECK(fired == 1);
  CHECK(std::chrono::steady_clock::now() - begin >= 95ms);
  std::this_thread::sleep_for(20ms);
  watchdog.stop();
  CHECK(fired == 1);
}

TEST_CASE("stop waits for the look under way, and none begins after it") {
  std::atomic<int> looks{0};
  ddp::detail::Watchdog<std::function<bool()>> watchdog(
      [&] {
        std::this_thread::sleep_for(5ms);
        ++looks;
        return true;
      },
      1ms);
  std::this_thread::sleep_for(30ms);
  watchdog.stop();
  const int at_stop = looks;
  CHECK(at_stop > 0);
  std::this_thread::sleep_for(20ms);
  CHECK(looks == at_stop);
}

TEST_CASE("the probe may destroy its watchdog") {
  using Watchdog = ddp::detail::Watchdog<std::function<bool()>>;
  auto holder = std::make_shared<std::unique_ptr<Watchdog>>();
  std::atomic<bool> may_destroy{false};
  std::atomic<bool> destroyed{false};
  *holder = std::make_unique<Watchdog>(
      [&] {
        if (!may_destroy) {
          return true;
        }
        holder->reset();
        destroyed = true;
        return false;
      },
      1ms);
  may_destroy = true;
  for (int i = 0; i < 5000 && !destroyed; ++i) {
    std::this_thread::sleep_for(1ms);
  }
  CHECK(destroyed);
  std::this_thread::sleep_for(10ms);  // the thread ends
}
