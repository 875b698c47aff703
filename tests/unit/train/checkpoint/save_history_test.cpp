// SPDX-License-Identifier: Apache-2.0
// What a run remembers of its saves.
#include "train/checkpoint/save_history.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "support/stderr_of.hpp"

namespace {

using ddp::KeepBest;
using ddp::detail::SavedStep;
using ddp::detail::SaveFailure;
using ddp::detail::SaveHistory;
using testing::num_found;
using testing::stderr_of;

SaveHistory history_with(KeepBest keep_best, bool is_main = true) {
  ddp::CheckpointOptions options;
  options.max_failures = 2;
  options.keep_best = keep_best;
  return {options, is_main};
}

}  // namespace

TEST_CASE("a step is saved again only for a metric that keep_best uses") {
  const auto keep_best = GENERATE(KeepBest::Off, KeepBest::Min);
  const bool uses = keep_best == KeepBest::Min;
  const auto history = history_with(keep_best);
  const SavedStep plain{3, false}, rated{3, true};
  REQUIRE(history.would_repeat(plain, plain));
  REQUIRE(history.would_repeat(rated, plain));
  REQUIRE(history.would_repeat(rated, rated));
  REQUIRE(history.would_repeat(plain, rated) == !uses);
  REQUIRE_FALSE(history.would_repeat(plain, {4, false}));
}

TEST_CASE("max_failures counts failures in a row") {
  auto history = history_with(KeepBest::Off);
  const auto log = stderr_of([&] {
    history.record_failure(10, 1, "disk full");
    REQUIRE(history.failure()->rank == 1);
    history.record_saved({20, true});
    REQUIRE_FALSE(history.failure());
    REQUIRE(history.newest().done == 20);
    REQUIRE(history.newest().has_metric);
    history.record_failure(30, 1, "disk full");
    const auto message =
        testing::message_of<SaveFailure>([&] { history.record_failure(40, 2, "quota exceeded"); });
    REQUIRE(message ==
            "the checkpoint after 40 steps was not saved (failure 2 of at most 2 in a row, "
            "checkpoint.max_failures): rank 2: quota exceeded; earlier checkpoints are untouched");
    REQUIRE_FALSE(history.failure());  // thrown once
  });
  REQUIRE(num_found(log, "failure 1 of at most 2 in a row") == 2);
  REQUIRE(num_found(log, "failure 2 of") == 0);
}

TEST_CASE("a failure is returned once, and a restore does not clear it") {
  auto history = history_with(KeepBest::Off);
  stderr_of([&] { history.record_failure(10, 1, "disk full"); });
  history.record_restored({5, false});
  REQUIRE(history.newest().done == 5);
  REQUIRE(history.take_failure().value().rank == 1);
  REQUIRE_FALSE(history.take_failure());
}

TEST_CASE("rank 0 logs once, at the first later step, that training continues") {
  const bool is_main = GENERATE(true, false);
  auto history = history_with(KeepBest::Off, is_main);
  history.record_saved({8, false});
  const auto log = stderr_of([&] {
    history.record_call(9);
    history.record_failure(10, 1, "disk full");
    history.record_call(9);
  });
  REQUIRE(num_found(log, "training continues") == 0);
  const auto later = stderr_of([&] {
    history.record_call(10);
    history.record_call(11);
  });
  REQUIRE(
      num_found(later,
                "training continues after the failed save; the newest checkpoint has 8 steps") ==
      (is_main ? 1 : 0));
}
