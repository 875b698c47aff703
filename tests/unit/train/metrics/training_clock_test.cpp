// SPDX-License-Identifier: Apache-2.0
// Training time and energy, with a clock and a GPU that the test moves.
#include <cmath>

#include "support/catch.hpp"
#include "train/metrics/training_clock.hpp"

namespace {

using namespace std::chrono_literals;
using ddp::detail::TrainingClock;

const TrainingClock::TimePoint kBegin{};

}  // namespace

TEST_CASE("time and energy count from the end of the first step") {
  TrainingClock clock;
  REQUIRE_FALSE(clock.has_started());
  REQUIRE(clock.seconds(kBegin + 5s) == 0);
  REQUIRE(clock.joules(500) == 0);
  clock.pause(kBegin + 5s, 500);
  clock.resume(kBegin + 7s, 700);
  clock.start(kBegin + 10s, 1000);  // an earlier pause does not count
  REQUIRE(clock.has_started());
  REQUIRE(clock.seconds(kBegin + 12s) == 2);
  REQUIRE(clock.joules(1300) == 300);
}

TEST_CASE("pauses count neither as time nor as energy, and nested ones count once") {
  TrainingClock clock;
  clock.start(kBegin, 100);
  clock.pause(kBegin + 2s, 150);
  REQUIRE(clock.is_paused());
  REQUIRE(clock.seconds(kBegin + 9s) == 2);  // stands still
  REQUIRE(clock.joules(900) == 50);
  clock.pause(kBegin + 3s, 160);
  clock.resume(kBegin + 4s, 170);
  REQUIRE(clock.is_paused());
  clock.resume(kBegin + 5s, 180);
  REQUIRE_FALSE(clock.is_paused());
  REQUIRE(clock.seconds(kBegin + 6s) == 3);
  REQUIRE(clock.joules(200) == 70);
}

TEST_CASE("energy that the GPU does not report stays unknown") {
  TrainingClock clock;
  clock.start(kBegin, NAN);
  REQUIRE(std::isnan(clock.joules(NAN)));
  REQUIRE(clock.seconds(kBegin + 1s) == 1);
}
