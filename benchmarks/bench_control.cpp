// SPDX-License-Identifier: Apache-2.0
// Benchmarks the control plane with threads as ranks: the time of its collectives, the frames that
// rank 0 sends, and the slowdown of training steps. These steps poll for a stop about once a second
// and gather metrics in every tenth step.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "core/control/star_plane.hpp"
#include "core/launch/rendezvous.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/train/command_line.hpp"
#include "train/checkpoint/checkpoint_exchange.hpp"

namespace {

constexpr const char* kUsage = R"(usage:
  bench_control [ranks=64] [bytes=100] [rounds=50] [step_ms=10] [steps=300]

Prints one JSON line. Times are medians over the rounds on rank 0; all ranks share this machine.
)";

using Clock = std::chrono::steady_clock;
using Ms = std::chrono::duration<double, std::milli>;

class LocalRendezvous final : public ddp::detail::Rendezvous {
 public:
  std::string bind_address() override { return "127.0.0.1"; }
  std::string exchange(int rank, const std::string& contact,
                       std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    if (rank == 0) {
      contact_ = contact;
      known_.notify_all();
    }
    known_.wait_for(lock, timeout, [this] { return !contact_.empty(); });
    return contact_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable known_;
  std::string contact_;
};

struct Options {
  std::map<std::string, int> values{
      {"ranks", 64}, {"bytes", 100}, {"rounds", 50}, {"step_ms", 10}, {"steps", 300}};

  Options(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string word = argv[i];
      const auto equals = word.find('=');
      const auto known = values.find(word.substr(0, equals));
      if (equals == std::string::npos || known == values.end()) {
        std::fprintf(stderr, "bench_control: '%s' is no setting\n", word.c_str());
        std::exit(64);
      }
      known->second = std::atoi(word.c_str() + equals + 1);
    }
  }
  int operator[](const char* name) const { return values.at(name); }
};

struct Results {
  double all_gather_ms = 0, gather_ms = 0, plain_step_ms = 0, step_ms = 0;
  double frames_per_all_gather = 0, frames_per_gather = 0;
  std::atomic<double> longest_progress_ms{0};
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Returns the median on this rank and the frames it sent per round.
std::pair<double, double> time_rounds(ddp::ControlPlane& plane, int rounds,
                                      const std::function<void()>& round) {
  const auto& sent = dynamic_cast<const ddp::detail::StarPlane&>(plane);
  plane.barrier();
  const auto before = sent.num_frames_sent();
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    const auto begin = Clock::now();
    round();
    times.push_back(Ms(Clock::now() - begin).count());
  }
  return {median(times), static_cast<double>(sent.num_frames_sent() - before) / rounds};
}

// A wait stands for the computation of each step, equally long on every rank.
double time_steps(ddp::ControlPlane& plane, const Options& options, bool talks, Results& results) {
  ddp::detail::CheckpointSchedule schedule({}, Clock::now());
  const std::string numbers(200, 'n');
  plane.barrier();
  const auto begin = Clock::now();
  auto due = begin;
  for (int step = 0; step < options["steps"]; ++step) {
    due = std::max(due, Clock::now()) + std::chrono::milliseconds(options["step_ms"]);
    std::this_thread::sleep_until(due);
    if (!talks) {
      continue;
    }
    const auto told = Clock::now();
    plane.set_progress(step, "forward");
    const double ms = Ms(Clock::now() - told).count();
    for (double seen = results.longest_progress_ms;
         ms > seen && !results.longest_progress_ms.compare_exchange_weak(seen, ms);) {
    }
    if (schedule.is_exchange_due(step + 1)) {
      schedule.begin_exchange(step + 1, Clock::now());
      const auto statuses = ddp::detail::exchange_statuses(
          plane,
          {.step_seconds = schedule.step_seconds(), .pause_seconds = schedule.pause_seconds()});
      schedule.end_exchange(step + 1, Clock::now(), ddp::detail::slowest_step(statuses),
                            statuses[0].pause_seconds);
    }
    if (step % 10 == 9) {
      plane.gather(numbers);
    }
  }
  return Ms(Clock::now() - begin).count() / options["steps"];
}

void run_rank(int rank, const Options& options,
              const std::shared_ptr<ddp::detail::Rendezvous>& rendezvous, Results& results) {
  ddp::LaunchEnvironment launch;
  launch.rank = rank;
  launch.world_size = options["ranks"];
  const auto plane = ddp::detail::create_control_plane(launch, rendezvous, {});
  const std::string value(static_cast<std::size_t>(options["bytes"]), 'v');
  const auto all = time_rounds(*plane, options["rounds"], [&] { plane->all_gather(value); });
  const auto one = time_rounds(*plane, options["rounds"], [&] { plane->gather(value); });
  const double plain = time_steps(*plane, options, false, results);
  const double step = time_steps(*plane, options, true, results);
  if (rank == 0) {
    std::tie(results.all_gather_ms, results.frames_per_all_gather) = all;
    std::tie(results.gather_ms, results.frames_per_gather) = one;
    results.plain_step_ms = plain;
    results.step_ms = step;
  }
  plane->close();
}

}  // namespace

int main(int argc, char** argv) {
  if (ddp::answer_command_line(argc, argv, kUsage)) {
    return 0;
  }
  const Options options(argc, argv);
  const auto rendezvous = std::make_shared<LocalRendezvous>();
  Results results;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < options["ranks"]; ++rank) {
    threads.emplace_back([&, rank] { run_rank(rank, options, rendezvous, results); });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  std::printf(
      "{\"ranks\": %d, \"bytes\": %d, \"all_gather_ms\": %.3f, \"frames_per_all_gather\": %.1f, "
      "\"gather_ms\": %.3f, \"frames_per_gather\": %.1f, \"plain_step_ms\": %.3f, \"step_ms\": "
      "%.3f, \"slower_percent\": %.2f, \"longest_set_progress_ms\": %.3f}\n",
      options["ranks"], options["bytes"], results.all_gather_ms, results.frames_per_all_gather,
      results.gather_ms, results.frames_per_gather, results.plain_step_ms, results.step_ms,
      100 * (results.step_ms / results.plain_step_ms - 1), results.longest_progress_ms.load());
  return 0;
}
