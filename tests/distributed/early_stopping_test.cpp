// SPDX-License-Identifier: Apache-2.0
// Early stopping by Lightning's rules, agreed between ranks and resumed.
#include "ddp/train/early_stopping.hpp"

#include <cmath>

#include "ddp/core/error.hpp"
#include "support/catch.hpp"
#include "support/multi_rank_main.hpp"

using ddp::EarlyStopping;
using ddp::EarlyStoppingOptions;
using ddp::test::context;

namespace {

/// Evaluations up to the one that stops; 0: none does.
int64_t evaluations_until_stop(const EarlyStoppingOptions& options,
                               const std::vector<double>& metrics) {
  EarlyStopping stopping(context(), options);
  int64_t evaluations = 0;
  for (const double metric : metrics) {
    REQUIRE(!stopping.has_stopped());
    ++evaluations;
    // Rank 0 decides: the others have metrics that never improve, or always do.
    const double others =
        (options.maximize ? 1 : -1) * (context().rank() % 2 == 1 ? evaluations : 0.0);
    if (stopping.should_stop(context().is_main() ? metric : others)) {
      REQUIRE(stopping.has_stopped());
      return evaluations;
    }
  }
  return 0;
}

}  // namespace

TEST_CASE("patience counts evaluations without an improvement larger than min_delta") {
  CHECK(evaluations_until_stop({.patience = 2}, {3, 2, 2, 1, 1, 0.5}) == 0);
  CHECK(evaluations_until_stop({.patience = 2}, {3, 2, 2, 2}) == 4);
  CHECK(evaluations_until_stop({.patience = 1}, {3, 3}) == 2);
  CHECK(evaluations_until_stop({.patience = 2, .min_delta = 0.25}, {1, 0.875, 0.5, 0.375, 0.25}) ==
        5);
  CHECK(evaluations_until_stop({.patience = 2, .maximize = true}, {0.1, 0.5, 0.4, 0.5, 0.6}) == 4);
  CHECK(evaluations_until_stop({.patience = 2, .maximize = true}, {0.1, 0.5, 0.4, 0.6, 0.5}) == 0);
}

TEST_CASE("a metric that is not finite stops at once, unless told otherwise") {
  CHECK(evaluations_until_stop({}, {1, NAN}) == 2);
  CHECK(evaluations_until_stop({}, {HUGE_VAL}) == 1);
  CHECK(evaluations_until_stop({.patience = 2, .check_finite = false}, {1, NAN, 0.5}) == 0);
}

TEST_CASE("a resumed run continues to count") {
  EarlyStopping first(context(), {.patience = 2});
  first.should_stop(1);
  first.should_stop(1);
  EarlyStopping resumed(context(), {.patience = 2});
  resumed.load_state_dict(first.state_dict());
  CHECK(resumed.best() == 1);
  CHECK(resumed.num_waits() == 1);
  CHECK(resumed.should_stop(1));
  EarlyStopping ended(context(), {.patience = 2});
  ended.load_state_dict(resumed.state_dict());
  CHECK(ended.has_stopped());
  auto state = first.state_dict();
  state.values.erase("best");
  CHECK_THROWS_WITH(ended.load_state_dict(state), Catch::Contains("key best is missing"));
}

TEST_CASE("a run that was stopped stays so") {
  EarlyStopping stopping(context(), {.patience = 1});
  CHECK_FALSE(stopping.should_stop(2));
  CHECK(stopping.should_stop(2));
  CHECK(stopping.should_stop(1));
  CHECK(stopping.best() == 1);
  CHECK(stopping.has_stopped());
}

TEST_CASE("impossible options of early stopping are refused") {
  CHECK_THROWS_AS(EarlyStopping(context(), {.patience = 0}), ddp::SettingsError);
  CHECK_THROWS_AS(EarlyStopping(context(), {.min_delta = -0.5}), ddp::SettingsError);
}
