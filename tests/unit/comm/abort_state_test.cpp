// SPDX-License-Identifier: Apache-2.0
// Free of LibTorch: also runs under the thread sanitizer.
#include "comm/abort_state.hpp"

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "support/message_of.hpp"

using ddp::detail::AbortState;

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
