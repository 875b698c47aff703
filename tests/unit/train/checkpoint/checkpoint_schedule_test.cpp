// SPDX-License-Identifier: Apache-2.0
// When saves and exchanges are due, with a clock that the test moves.
#include "support/catch.hpp"
#include "train/checkpoint/checkpoint_exchange.hpp"

namespace {

using namespace std::chrono_literals;
using ddp::CheckpointOptions;
using ddp::detail::CheckpointSchedule;

const CheckpointSchedule::Clock::time_point kStart{};

CheckpointOptions scheduled() {
  CheckpointOptions options;
  options.dir = "somewhere";
  options.every_steps = 40;
  options.every_minutes = 2;
  options.stop_check_seconds = 1;
  return options;
}

// The first exchange with a measured step comes after 10 steps of 10 ms. An exchange takes no time.
CheckpointSchedule after_ten_steps(double slowest_step, double pause) {
  CheckpointSchedule schedule(scheduled(), kStart);
  schedule.begin_exchange(1, kStart);
  schedule.end_exchange(1, kStart, 0, 1);
  schedule.begin_exchange(11, kStart + 100ms);
  schedule.end_exchange(11, kStart + 100ms, slowest_step, pause);
  return schedule;
}

}  // namespace

TEST_CASE("a save is due at every multiple of every_steps") {
  const CheckpointSchedule schedule(scheduled(), kStart);
  REQUIRE(schedule.is_due_by_steps(40));
  REQUIRE(schedule.is_due_by_steps(80));
  REQUIRE_FALSE(schedule.is_due_by_steps(41));
}

TEST_CASE("a save is due every_minutes after the start of the last one") {
  CheckpointSchedule schedule(scheduled(), kStart);
  REQUIRE_FALSE(schedule.is_due_by_time(kStart + 119s));
  REQUIRE(schedule.is_due_by_time(kStart + 120s));
  schedule.record_save(kStart + 125s);
  REQUIRE_FALSE(schedule.is_due_by_time(kStart + 244s));
  REQUIRE(schedule.is_due_by_time(kStart + 245s));
}

TEST_CASE("no save is due with zeros or without a folder, but exchanges are") {
  auto options = scheduled();
  const bool has_folder = GENERATE(true, false);
  if (has_folder) {
    options.every_steps = 0;
    options.every_minutes = 0;
  } else {
    options.dir = "";
  }
  const CheckpointSchedule schedule(options, kStart);
  REQUIRE_FALSE(schedule.is_due_by_steps(40));
  REQUIRE_FALSE(schedule.is_due_by_time(kStart + 1000min));
  REQUIRE(schedule.is_exchange_due(1));
}

TEST_CASE("a step's duration is measured between exchanges") {
  CheckpointSchedule schedule(scheduled(), kStart);
  REQUIRE(schedule.is_exchange_due(1));
  schedule.begin_exchange(1, kStart + 5s);
  REQUIRE(schedule.step_seconds() == 0);  // the first step has a warm-up
  schedule.end_exchange(1, kStart + 6s, 0, 1);
  REQUIRE_FALSE(schedule.is_exchange_due(1));
  REQUIRE(schedule.is_exchange_due(2));  // nothing measured yet: at once
  schedule.begin_exchange(5, kStart + 8s);
  REQUIRE(schedule.step_seconds() == 0.5);  // 4 steps from 6 s to 8 s, without the exchange
}

TEST_CASE("the next exchange comes after the pause, in steps of the slowest rank") {
  auto schedule = after_ten_steps(0.02, 1);
  REQUIRE_FALSE(schedule.is_exchange_due(11 + 49));
  REQUIRE(schedule.is_exchange_due(11 + 50));
  // One step longer than the pause, and steps too short to count.
  REQUIRE_FALSE(after_ten_steps(30, 1).is_exchange_due(11));
  REQUIRE(after_ten_steps(30, 1).is_exchange_due(12));
  const auto fast = after_ten_steps(1e-9, 1);
  REQUIRE_FALSE(fast.is_exchange_due(11 + 9'999));
  REQUIRE(fast.is_exchange_due(11 + 10'000));
}

TEST_CASE("long exchanges are rare") {
  CheckpointSchedule schedule(scheduled(), kStart);
  REQUIRE(schedule.pause_seconds() == 1);
  for (int64_t done = 1; done < 3; ++done) {
    schedule.begin_exchange(done, kStart + done * 10s);
    schedule.end_exchange(done, kStart + done * 10s + 40ms, 0, 1);
  }
  REQUIRE(schedule.pause_seconds() == Approx(49 * 0.04));
}
