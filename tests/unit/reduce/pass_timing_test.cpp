// SPDX-License-Identifier: Apache-2.0
#include "reduce/pass_timing.hpp"

#include <chrono>
#include <thread>

#include "support/catch.hpp"

using ddp::detail::PassTiming;

namespace {

void sleep_ms(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

/// How long the stages of one training step take.
struct Stages {
  int forward = 0;
  int first_bucket = 0;  // of the backward until its first reduction starts
  int other_buckets = 0;
  int wait = 0;
};

void run_until_wait(PassTiming& timing, const Stages& stages) {
  timing.begin_forward();
  sleep_ms(stages.forward);
  timing.begin_backward();
  sleep_ms(stages.first_bucket);
  timing.record_first_reduction();
  sleep_ms(stages.other_buckets);
  timing.record_last_gradient();
}

void run_pass(PassTiming& timing, const Stages& stages) {
  run_until_wait(timing, stages);
  timing.begin_wait();
  sleep_ms(stages.wait);
  timing.end_wait();
  timing.end_pass();
}

ddp::DdpLoggingData averages(PassTiming& timing) {
  ddp::DdpLoggingData data;
  timing.add_to(data);
  return data;
}

}  // namespace

TEST_CASE("times are averaged over the measured backwards") {
  PassTiming timing(at::kCPU, /*times_replays=*/true);
  CHECK(averages(timing).avg_backward_compute_time == 0);
  run_pass(timing, {.forward = 20, .first_bucket = 60, .other_buckets = 20, .wait = 40});
  CHECK(timing.exposed_ms() >= 40);
  run_pass(timing, {.forward = 60, .first_bucket = 20, .other_buckets = 0, .wait = 0});
  CHECK(timing.exposed_ms() < 40);
  const auto data = averages(timing);
  // A sleep never ends early, and a loaded machine prolongs it.
  CHECK(data.avg_forward_compute_time >= 40);
  CHECK(data.avg_backward_compute_time >= 50);
  CHECK(data.avg_backward_comm_time >= 30);
  CHECK(data.avg_backward_compute_comm_overlap_time >= 10);
  CHECK(data.avg_forward_compute_time < 60);
  CHECK(data.avg_backward_compute_time < 80);
  CHECK(data.avg_backward_comm_time < 50);
  CHECK(data.avg_backward_compute_comm_overlap_time < 20);
}

TEST_CASE("an abandoned pass is not averaged") {
  PassTiming timing(at::kCPU, true);
  run_until_wait(timing, {.forward = 100, .first_bucket = 100});
  timing.abandon();
  CHECK(averages(timing).avg_forward_compute_time == 0);
  run_pass(timing, {.forward = 10});
  const auto data = averages(timing);
  CHECK(data.avg_forward_compute_time >= 10);
  CHECK(data.avg_forward_compute_time < 50);
  CHECK(data.avg_backward_compute_time < 50);
}

TEST_CASE("a forward without a backward is not averaged") {
  PassTiming timing(at::kCPU, true);
  timing.begin_forward();
  sleep_ms(100);
  run_pass(timing, {.forward = 10});
  CHECK(averages(timing).avg_forward_compute_time < 100);
}

TEST_CASE("a backward without a measured forward has no time of a forward") {
  PassTiming timing(at::kCPU, true);
  run_pass(timing, {.forward = 10});
  sleep_ms(100);
  timing.begin_backward();
  timing.record_first_reduction();
  timing.record_last_gradient();
  timing.begin_wait();
  timing.end_wait();
  timing.end_pass();
  CHECK(averages(timing).avg_forward_compute_time >= 10);
  CHECK(averages(timing).avg_forward_compute_time < 50);
}

TEST_CASE("the first 10 backwards are measured, then every 100th") {
  PassTiming timing(at::kCPU, true);
  for (int pass = 0; pass < 10; ++pass) {
    run_pass(timing, {});
  }
  for (int pass = 10; pass < 100; ++pass) {
    run_pass(timing, {.forward = pass == 10 ? 110 : 0, .wait = pass == 10 ? 20 : 0});
    if (pass == 10) {
      CHECK(timing.exposed_ms() >= 20);  // the last backward, measured or not
      CHECK(averages(timing).avg_forward_compute_time < 10);
    }
  }
  CHECK(averages(timing).avg_forward_compute_time < 10);
  run_pass(timing, {.forward = 110});
  CHECK(averages(timing).avg_forward_compute_time >= 10);  // 110 ms in 11 backwards
}
