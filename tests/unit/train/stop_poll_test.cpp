// SPDX-License-Identifier: Apache-2.0
#include "ddp/train/stop_poll.hpp"

#include <atomic>
#include <thread>
#include <vector>

#include "support/catch.hpp"
#include "unit/train/thread_control_plane.hpp"

namespace {

struct RankResult {
  int64_t num_batches = 0;
  bool stopped = false;
  std::string who;
};

/// Each rank takes batches of 1 ms. The rank `asked` is asked to stop before its batch `at`.
std::vector<RankResult> evaluate(const std::vector<int64_t>& num_batches, int asked, int64_t at) {
  std::vector<RankResult> results(num_batches.size());
  const auto errors =
      testing::run_ranks(static_cast<int>(num_batches.size()), [&](ddp::ControlPlane& plane) {
        const auto rank = static_cast<std::size_t>(plane.rank());
        auto& result = results[rank];
        ddp::StopPoll poll(plane, 0.005, "evaluation",
                           [&] { return plane.rank() == asked && result.num_batches >= at; });
        for (int64_t i = 0; i < num_batches[rank]; ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
          ++result.num_batches;
          if (poll.should_stop()) {
            break;
          }
        }
        result.stopped = poll.finish();
        result.who = poll.stop_reason();
      });
  for (const auto& error : errors) {
    REQUIRE(error == nullptr);
  }
  return results;
}

}  // namespace

TEST_CASE("ranks with different numbers of batches finish together") {
  const std::vector<int64_t> batches = {0, 40, 3};
  const auto results = evaluate(batches, /*asked=*/-1, 0);
  for (std::size_t rank = 0; rank < batches.size(); ++rank) {
    CHECK(results[rank].num_batches == batches[rank]);
    CHECK_FALSE(results[rank].stopped);
    CHECK(results[rank].who.empty());
  }
}

TEST_CASE("all ranks stop if one is asked, also if that one has finished") {
  const int asked = GENERATE(0, 1, 2);
  CAPTURE(asked);
  const auto results = evaluate({1000, 1, 2000}, asked, /*at=*/1);
  for (const auto& result : results) {
    CHECK(result.stopped);
    CHECK(result.who == "rank " + std::to_string(asked) + " was asked to stop");
    CHECK(result.num_batches < 500);
  }
}
