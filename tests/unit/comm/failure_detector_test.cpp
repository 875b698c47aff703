// SPDX-License-Identifier: Apache-2.0
// Free of LibTorch: also runs under the thread sanitizer.
#include "comm/watchdog.hpp"

#include <string>
#include <vector>

#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "support/stderr_of.hpp"

namespace {

using namespace std::chrono_literals;
using ddp::PeerLostError;
using ddp::detail::AbortState;
using ddp::detail::CollectiveFailure;
using ddp::detail::FailureDetector;
using ddp::detail::LaneProgress;
using ddp::detail::Stall;
using ddp::detail::StallDetector;
using ddp::detail::StepTimeouts;

// A communicator whose counters and errors the test sets.
struct Communicator {
  std::vector<LaneProgress> lanes{{0, 0}};
  std::string async_error;
  bool has_ended = false;
  std::vector<std::string> events;  // in order
  CollectiveFailure failure;
  std::shared_ptr<AbortState> state = std::make_shared<AbortState>();
  std::shared_ptr<StepTimeouts> timeouts = std::make_shared<StepTimeouts>(3000ms, 1000ms);

  FailureDetector detector{{.name = "the test communicator",
                            .membership = {.rank = 1, .world_size = 4},
                            .lanes = [this] { return lanes; },
                            .describe =
                                [](const Stall& stall) {
                                  return "broadcast #" + std::to_string(stall.progress.enqueued);
                                },
                            .poll_async_error =
                                [this] {
                                  if (!async_error.empty()) {
                                    throw PeerLostError(async_error);
                                  }
                                  return !has_ended;
                                },
                            .abort =
                                [this](const std::string& reason) {
                                  events.push_back("aborted: " + reason);
                                  state->abort(reason);
                                }},
                           [this](const CollectiveFailure& reported) {
                             events.push_back("reported: " + reported.collective);
                             failure = reported;
                           },
                           timeouts,
                           state};

  // The detector's clock limits the gap between two looks, so this looks every second.
  bool look_for(std::chrono::seconds duration) {
    for (const auto end = now + duration; now < end;) {
      now += 1s;
      if (!detector.check(now)) {
        return false;
      }
    }
    return true;
  }
  StallDetector::TimePoint now = StallDetector::TimePoint{} + 1h;
};

}  // namespace

TEST_CASE("a collective that does not end is reported to peers, then aborts") {
  Communicator communicator;
  communicator.timeouts->set_step(7);
  CHECK(communicator.look_for(60s));
  communicator.lanes = {{5, 4}};
  const auto log = testing::stderr_of([&] { CHECK_FALSE(communicator.look_for(60s)); });
  const std::string collective = "broadcast #5 of the test communicator, rank 1 of 4";
  const std::string message =
      collective +
      ": no collective ended for 1000 ms: a peer is lost, stuck, or makes other calls than this "
      "rank";
  CHECK((communicator.events ==
         std::vector<std::string>{"reported: " + collective, "aborted: " + message}));
  CHECK(communicator.failure.step == 7);
  CHECK(testing::message_of<PeerLostError>(
            [&] { std::rethrow_exception(communicator.failure.error); }) == message);
  CHECK(log.find(message) != std::string::npos);
}

TEST_CASE("the first step's limit applies until step 1") {
  Communicator communicator;
  communicator.lanes = {{1, 0}};
  CHECK(communicator.look_for(3s));  // the first look starts the clock
  CHECK(communicator.events.empty());
  testing::stderr_of([&] { CHECK_FALSE(communicator.look_for(1s)); });
  CHECK(communicator.events.size() == 2);
}

TEST_CASE("the backend's own error is reported and aborts") {
  Communicator communicator;
  communicator.async_error = "remote error";
  testing::stderr_of([&] { CHECK_FALSE(communicator.look_for(1s)); });
  CHECK((communicator.events ==
         std::vector<std::string>{"reported: a collective of the test communicator",
                                  "aborted: remote error"}));
}

TEST_CASE("an aborted or ended communicator reports nothing") {
  Communicator aborted;
  aborted.state->abort("by a user");
  aborted.async_error = "remote error";
  CHECK_FALSE(aborted.look_for(1s));
  CHECK(aborted.events.empty());

  Communicator ended;
  ended.has_ended = true;
  CHECK_FALSE(ended.look_for(1s));
  CHECK(ended.events.empty());
}
