// SPDX-License-Identifier: Apache-2.0
// Intervals of one rank's counts, and their sums over ranks.
#include "train/metrics/ranks/rank_counter.hpp"

#include <chrono>
#include <future>
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

TEST_CASE("waits of loaders add up, without those of pauses") {
  using ddp::detail::StepWait;
  using ddp::detail::WaitKind;
  std::vector<double> ms(4);
  const auto add_loader = [&](size_t i) {
    return std::make_unique<StepWait>(WaitKind::Batches, [&ms, i] { return ms[i]; });
  };
  add_loader(0).reset();  // registers nothing that later cases see
  ddp::detail::LoaderWait wait(StepWait::total_of_batches());
  const auto read = [&](bool counts = true) {
    wait.read(StepWait::total_of_batches(), counts);
    return wait.milliseconds();
  };
  REQUIRE(!read().has_value());
  auto first = add_loader(0);
  ms = {5, 0, 0, 0};
  REQUIRE(read() == 5.0);
  auto second = add_loader(1);
  ms = {8, 10, 0, 0};
  REQUIRE(read() == 18.0);
  ms = {9, 40, 0, 0};
  {  // lives only in a pause
    ms[2] = 100;
    add_loader(2).reset();
  }
  REQUIRE(read(/*counts=*/false) == 18.0);
  ms[0] = 12;
  first.reset();
  REQUIRE(read() == 21.0);  // its last 3 ms count
  ms[3] = 7;
  add_loader(3).reset();  // from one reading to the next
  REQUIRE(read() == 28.0);
  second.reset();
  REQUIRE(read() == 28.0);
  wait.restart();
  wait.read({.milliseconds = 2, .has_loader = true});
  REQUIRE(wait.milliseconds() == 30.0);
  ddp::detail::LoaderWait of_next_run(StepWait::total_of_batches());
  of_next_run.read(StepWait::total_of_batches());
  REQUIRE(!of_next_run.milliseconds().has_value());
}

TEST_CASE("exposed communication is that of models that trained since the last reading") {
  using Readings = std::vector<ddp::detail::StepWait::Reading>;
  const Readings earlier = {{.id = 1, .milliseconds = 8, .num_passes = 3}};  // of another run
  ddp::detail::ReductionWait wait(earlier);
  REQUIRE(!ddp::detail::ReductionWait().read({}).has_value());
  Readings readings = {earlier[0],
                       {.id = 2, .milliseconds = 1, .num_passes = 1},
                       {.id = 3, .milliseconds = 2, .num_passes = 0}};
  REQUIRE(wait.read(readings) == 1.0);
  readings[2].num_passes = 1;
  REQUIRE(wait.read(readings) == 2.0);
  REQUIRE(wait.read(readings) == 0.0);
  readings[0].num_passes = 4;
  readings[1].num_passes = std::nullopt;  // its backwards are replays
  REQUIRE(wait.read(readings) == 9.0);
}

TEST_CASE("a thread does not wait for the reading of another") {
  using ddp::detail::StepWait;
  using ddp::detail::WaitKind;
  std::promise<void> reads, go_on;
  std::thread reader([&] {
    const StepWait model(WaitKind::Reductions, [&] {
      reads.set_value();
      go_on.get_future().wait();
      return 1.0;
    });
    StepWait::read_all(WaitKind::Reductions);
  });
  reads.get_future().wait();
  auto other = std::async(std::launch::async, [] {
    const StepWait model(WaitKind::Reductions, [] { return 2.0; });
    return StepWait::read_all(WaitKind::Reductions).size();
  });
  const bool is_free = other.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
  go_on.set_value();
  reader.join();
  REQUIRE(is_free);
  REQUIRE(other.get() == 1);
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
