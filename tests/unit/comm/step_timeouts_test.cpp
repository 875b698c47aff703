// SPDX-License-Identifier: Apache-2.0
#include "comm/step_timeouts.hpp"

#include "support/catch.hpp"

using namespace std::chrono_literals;
using ddp::detail::StepTimeouts;

TEST_CASE("the limit of the first step holds until step 1") {
  StepTimeouts timeouts(/*first_step=*/30s, /*later=*/10s);
  CHECK(timeouts.step() == 0);
  CHECK(timeouts.current() == 30s);
  timeouts.set_step(1);
  CHECK(timeouts.step() == 1);
  CHECK(timeouts.current() == 10s);
  timeouts.set_step(0);  // a restarted run
  CHECK(timeouts.current() == 30s);
}

TEST_CASE("the shortest limit is either of the two") {
  CHECK(StepTimeouts(30s, 10s).shortest() == 10s);
  CHECK(StepTimeouts(10s, 30s).shortest() == 10s);
}
