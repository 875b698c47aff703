// SPDX-License-Identifier: Apache-2.0
// The statuses that ranks exchange, and rank 0's answers to all.
#include "train/checkpoint/checkpoint_exchange.hpp"
#include "support/catch.hpp"
#include "unit/train/thread_control_plane.hpp"

namespace {

using ddp::detail::broadcast_from_main;
using ddp::detail::exchange_statuses;
using ddp::detail::RankStatus;
using ddp::detail::StatusDigest;
using ddp::detail::WriterStatus;
using testing::run_ranks;

// Rank 2 of four was asked to stop, rank 3's writer failed, rank 1 is slowest.
std::vector<RankStatus> four_ranks() {
  std::vector<RankStatus> statuses(4);
  for (std::size_t rank = 0; rank < 4; ++rank) {
    statuses[rank].step_seconds = rank == 1 ? 0.5 : 0.25;
    statuses[rank].pause_seconds = static_cast<double>(rank) + 1;
    statuses[rank].writer.records = {{.name = "rank_" + std::to_string(rank), .size = 7}};
  }
  statuses[2].stop = true;
  statuses[3].writer.state = WriterStatus::State::Failed;
  statuses[3].writer.error = "disk full";
  return statuses;
}

}  // namespace

TEST_CASE("a digest keeps the first rank of each status, the slowest step, rank 0's pause") {
  const auto digest = StatusDigest::of(four_ranks());
  REQUIRE(digest.first_with.size() == 3);  // ranks 0 and 1 decide alike
  const auto statuses = digest.statuses();
  REQUIRE(statuses.size() == 4);
  REQUIRE(ddp::detail::slowest_step(statuses) == 0.5);
  REQUIRE(statuses[0].pause_seconds == 1);
  REQUIRE(statuses[2].stop);
  REQUIRE_FALSE(statuses[1].stop);
  REQUIRE(statuses[3].writer.state == WriterStatus::State::Failed);
  REQUIRE(statuses[3].writer.error == "disk full");
  REQUIRE(statuses[0].writer.records.empty());
}

// Catch's assertions are not thread-safe: ranks record, and the main thread compares.
TEST_CASE("an exchange gives rank 0 all files, and every rank the data for its decisions") {
  const auto own = four_ranks();
  std::vector<std::vector<RankStatus>> received(4);
  const auto errors = run_ranks(4, [&](ddp::ControlPlane& plane) {
    const auto rank = static_cast<std::size_t>(plane.rank());
    received[rank] = exchange_statuses(plane, own[rank]);
  });
  for (std::size_t receiver = 0; receiver < 4; ++receiver) {
    const auto& statuses = received[receiver];
    REQUIRE(errors[receiver] == nullptr);
    REQUIRE(statuses.size() == 4);
    REQUIRE(ddp::detail::slowest_step(statuses) == 0.5);
    REQUIRE(statuses[0].pause_seconds == 1);
    REQUIRE(statuses[2].stop);
    REQUIRE(statuses[3].writer.error == "disk full");
    for (std::size_t rank = 0; rank < 4; ++rank) {
      REQUIRE(statuses[rank].writer.records ==
              (receiver == 0 ? own[rank].writer.records : std::vector<ddp::FileRecord>{}));
    }
  }
}

TEST_CASE("every rank receives rank 0's value, or its error with the exit code") {
  const bool fails = GENERATE(false, true);
  std::vector<std::string> received(3);
  std::vector<int> num_made(3);
  const auto errors = run_ranks(3, [&](ddp::ControlPlane& plane) {
    const auto rank = static_cast<std::size_t>(plane.rank());
    received[rank] = broadcast_from_main(plane, [&]() -> std::string {
      ++num_made[rank];
      if (fails) {
        throw ddp::WriteError("no such folder");
      }
      return "from rank 0";
    });
  });
  REQUIRE(num_made == std::vector<int>{1, 0, 0});
  for (std::size_t rank = 0; rank < 3; ++rank) {
    const auto& error = errors[rank];
    REQUIRE((error != nullptr) == fails);
    if (fails) {
      REQUIRE_THROWS_WITH(std::rethrow_exception(error), Catch::Contains("no such folder"));
      REQUIRE_THROWS_AS(std::rethrow_exception(error), ddp::WriteError);
    } else {
      REQUIRE(received[rank] == "from rank 0");
    }
  }
}
