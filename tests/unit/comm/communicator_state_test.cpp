// SPDX-License-Identifier: Apache-2.0
// Free of LibTorch: also runs under the thread sanitizer.
#include "comm/communicator_state.hpp"

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "support/message_of.hpp"

using namespace std::chrono_literals;
using ddp::detail::AbortState;
using ddp::detail::kTrainingForward;
using ddp::detail::record_later_step;
using ddp::detail::report_step;
using ddp::detail::StepTimeouts;

TEST_CASE("calls fail after an abort and name its reason") {
  AbortState state;
  CHECK_FALSE(state.aborted());
  CHECK_NOTHROW(state.check("broadcast"));
  CHECK(state.abort("rank 3 is lost"));
  CHECK(state.aborted());
  CHECK(testing::message_of<ddp::PeerLostError>([&] { state.check("broadcast"); }) ==
        "broadcast: the communicator was aborted: rank 3 is lost");
}

TEST_CASE("the first of several aborts gives the reason") {
  AbortState state;
  std::atomic<int> num_first{0};
  std::atomic<int> first{-1};
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 8; ++i) {
      threads.emplace_back([&, i] {
        if (state.abort(std::to_string(i))) {
          ++num_first;
          first = i;
        }
      });
    }
  }
  CHECK(num_first == 1);
  CHECK(testing::message_of([&] { state.check("send"); }) ==
        "send: the communicator was aborted: " + std::to_string(first));
}

TEST_CASE("the limit of the first step holds until step 1") {
  StepTimeouts timeouts(/*first_step=*/30s, /*later=*/10s);
  CHECK(timeouts.step() == -1);  // none was announced
  CHECK(timeouts.current() == 30s);
  timeouts.set_step(1);
  CHECK(timeouts.step() == 1);
  CHECK(timeouts.current() == 10s);
  timeouts.set_step(0);  // a restarted run
  CHECK(timeouts.current() == 30s);
}

TEST_CASE("the limit of the first step ends without an announced step") {
  const StepTimeouts timeouts(/*first_step=*/30s, /*later=*/10s);
  report_step(kTrainingForward);
  CHECK(timeouts.current() == 30s);
  record_later_step();
  CHECK(timeouts.current() == 10s);
  CHECK(StepTimeouts(30s, 10s).current() == 30s);  // of a later context
}

TEST_CASE("the shortest limit is either of the two") {
  CHECK(StepTimeouts(30s, 10s).shortest() == 10s);
  CHECK(StepTimeouts(10s, 30s).shortest() == 10s);
}
