// SPDX-License-Identifier: Apache-2.0
// Intervals of one rank's counts, and their sums over ranks.
#include "train/metrics/ranks/rank_counter.hpp"

#include <memory>
#include <thread>

#include "core/log/step_waits.hpp"
#include "support/catch.hpp"

namespace {

using ddp::detail::JobNumbers;
using ddp::detail::RankCounter;
using ddp::detail::RankNumbers;

// Four steps of 8 samples, of which the first is not timed, then a reading.
RankCounter after_four_steps() {
  RankCounter counter;
  for (int step = 0; step < 4; ++step) {
    counter.add_step(8, /*timed=*/step > 0);
  }
  counter.read(
      {.losses = {.loss_sum = 40, .correct = 12, .loss_samples = 20, .correct_samples = 16},
       .seconds = 6,
       .energy_j = 300});
  return counter;
}

}  // namespace

TEST_CASE("the first step counts for the loss, not for the speed") {
  const auto numbers = after_four_steps().since_log();
  REQUIRE(numbers.loss_sum == 40);
  REQUIRE(numbers.correct == 12);
  REQUIRE(numbers.loss_samples == 20);
  REQUIRE(numbers.correct_samples == 16);
  REQUIRE(numbers.samples == 24);
  REQUIRE(numbers.steps == 3);
  REQUIRE(numbers.seconds == 6);
  REQUIRE(numbers.energy_j == 300);
  REQUIRE(std::isnan(numbers.loader_wait_ms));  // no loader is observed
  REQUIRE(std::isnan(numbers.exposed_comm_ms));
}

TEST_CASE("a log line has its own interval within the epoch") {
  auto counter = after_four_steps();
  counter.end_log();
  REQUIRE(counter.since_log().steps == 0);
  counter.add_step(8, true);
  counter.read({.losses = {.loss_sum = 5}, .seconds = 7, .energy_j = 310});
  REQUIRE(counter.since_log().seconds == 1);
  REQUIRE(counter.since_log().energy_j == 10);
  REQUIRE(counter.since_log().loss_sum == 5);
  REQUIRE(counter.since_epoch().steps == 4);
  REQUIRE(counter.since_epoch().loss_sum == 45);
  counter.end_epoch();
  REQUIRE(counter.since_epoch().samples == 0);
  REQUIRE(counter.since_log().samples == 8);  // a line may cover an epoch's end
}

TEST_CASE("a NaN loss stays in its own interval and epoch") {
  RankCounter counter;
  counter.read({.losses = {.loss_sum = NAN, .loss_samples = 1}});
  counter.end_log();
  counter.read({.losses = {.loss_sum = 3, .loss_samples = 1}});
  REQUIRE(counter.since_log().loss_sum == 3);
  REQUIRE(std::isnan(counter.since_epoch().loss_sum));
  counter.end_epoch();
  counter.read({.losses = {.loss_sum = 4, .loss_samples = 1}});
  REQUIRE(counter.since_log().loss_sum == 7);
  REQUIRE(counter.since_epoch().loss_sum == 4);
}

TEST_CASE("the loader wait is a mean over timed steps, without the first step") {
  RankCounter counter;
  counter.add_step(8, false);
  counter.begin_loader_wait(100);
  counter.read({.losses = {}, .loader_wait_ms = 100});
  REQUIRE(std::isnan(counter.since_log().loader_wait_ms));  // no timed step
  counter.add_step(8, true);
  counter.add_step(8, true);
  counter.read({.losses = {}, .loader_wait_ms = 106});
  REQUIRE(counter.since_log().loader_wait_ms == 3);
}

TEST_CASE(
    "a job's numbers are sums, the slowest rank's time, and means over the ranks that report "
    "them") {
  const JobNumbers job({{.loss_sum = 6,
                         .loss_samples = 2,
                         .samples = 10,
                         .seconds = 2,
                         .steps = 4,
                         .loader_wait_ms = 3,
                         .memory_gib = 1,
                         .utilisation = 50,
                         .energy_j = 1},
                        {.loss_sum = 4,
                         .loss_samples = 3,
                         .samples = 20,
                         .seconds = 5,
                         .steps = 4,
                         .loader_wait_ms = NAN,
                         .memory_gib = 7,
                         .utilisation = 70,
                         .energy_j = 2}});
  REQUIRE(job.world_size == 2);
  REQUIRE(job.loss() == 2);
  REQUIRE_FALSE(job.accuracy());
  REQUIRE(job.samples_per_second() == 6);
  REQUIRE(job.step_ms() == 1250);
  REQUIRE(job.total.loader_wait_ms == 3);
  REQUIRE(job.total.memory_gib == 7);
  REQUIRE(job.total.utilisation == 60);
  REQUIRE(job.total.energy_j == 3);
  REQUIRE(std::isnan(job.total.power_w));
  REQUIRE(std::isnan(JobNumbers({RankNumbers{}}).step_ms()));
}

TEST_CASE("waits of loaders add up, without those of pauses and of loaders that are gone") {
  ddp::detail::LoaderWait wait;
  REQUIRE(!wait.milliseconds().has_value());
  wait.read({});
  REQUIRE(!wait.milliseconds().has_value());
  wait.read({{.id = 1, .milliseconds = 5}});
  wait.read({{.id = 1, .milliseconds = 8}, {.id = 2, .milliseconds = 10}});
  REQUIRE(wait.milliseconds() == 18.0);
  wait.read({{.id = 1, .milliseconds = 9}, {.id = 2, .milliseconds = 40}}, /*counts=*/false);
  REQUIRE(wait.milliseconds() == 18.0);
  wait.read({{.id = 2, .milliseconds = 41}});  // loader 1 is gone
  wait.read({{.id = 2, .milliseconds = 41}, {.id = 3, .milliseconds = 1}});
  REQUIRE(wait.milliseconds() == 20.0);
}

TEST_CASE("a thread reads the waits of the objects that it made") {
  using ddp::detail::StepWait;
  using ddp::detail::WaitKind;
  const StepWait model(WaitKind::Reductions, [] { return 1.5; });
  auto loader = std::make_unique<StepWait>(WaitKind::Batches, [] { return 2.5; });
  const auto readings = StepWait::read_all(WaitKind::Batches);
  REQUIRE(readings.size() == 1);
  REQUIRE(readings[0].milliseconds == 2.5);
  bool sees_none = false;
  std::thread([&] { sees_none = StepWait::read_all(WaitKind::Reductions).empty(); }).join();
  REQUIRE(sees_none);
  loader.reset();
  REQUIRE(StepWait::read_all(WaitKind::Batches).empty());
  REQUIRE(StepWait::read_all(WaitKind::Reductions).size() == 1);
}
