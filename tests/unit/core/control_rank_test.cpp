// SPDX-License-Identifier: Apache-2.0
// The parts of one rank's control plane, each alone: the monitor and its waits, the event loop, the
// progress, the position, and pending replies.
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <thread>

#include "core/control/control_link.hpp"
#include "core/control/failure/failure_cause.hpp"
#include "core/control/failure/job_monitor.hpp"
#include "core/control/plane_interfaces.hpp"
#include "core/control/plane_service.hpp"
#include "core/control/rank_reports.hpp"
#include "core/launch/training_state.hpp"
#include "support/catch.hpp"
#include "unit/core/plane_ranks.hpp"

namespace ddp::test {
namespace {

using detail::EventLoop;
using detail::JobMonitor;
using detail::PositionReporter;
using detail::ProgressTracker;
using detail::ReplyStore;
using detail::WakeEvent;

FailureCause cause_saying(const std::string& message) {
  FailureCause cause;
  cause.message = message;
  cause.exit_code = ExitCode::Data;
  return cause;
}

bool is_notified(const WakeEvent& wake) {
  pollfd watched{wake.fd(), POLLIN, 0};
  return poll(&watched, 1, 0) == 1;
}

TEST_CASE("job monitor: a wait ends with its condition or its deadline", "[control_plane]") {
  JobMonitor monitor(0, 1s);
  bool holds = false;
  auto setter = std::async(std::launch::async, [&] {
    std::this_thread::sleep_for(50ms);
    const auto lock = monitor.lock();
    holds = true;
    monitor.notify();
  });
  auto lock = monitor.lock();
  const auto start = Clock::now();
  REQUIRE(monitor.wait_until(lock, monitor.now() + 10s, [&] { return holds; }));
  REQUIRE(seconds_since(start) < 5);
  REQUIRE_FALSE(monitor.wait_until(lock, monitor.now() + 20ms, [] { return false; }));
  monitor.wait_despite_failure(lock, 20ms, [] { return false; });
}

TEST_CASE("job monitor: a failure ends every wait, and its first cause is thrown",
          "[control_plane]") {
  JobMonitor monitor(0, 1s);
  bool first_counts = false, second_counts = true;
  const std::vector<std::function<void()>> waits{
      [&] {
        auto lock = monitor.lock();
        monitor.wait_until(lock, monitor.now() + 60s, [] { return false; });
      },
      [&] {
        auto lock = monitor.lock();
        monitor.wait(lock, [] { return false; });
        monitor.throw_if_failed();
      },
      [&] {
        std::this_thread::sleep_for(50ms);
        const auto lock = monitor.lock();
        first_counts = monitor.set_failure(cause_saying("first"), /*found_here=*/false);
        second_counts = monitor.set_failure(cause_saying("second"), /*found_here=*/true);
      }};
  const auto start = Clock::now();
  const auto ends = run_threads(waits);
  REQUIRE(seconds_since(start) < 5);
  REQUIRE(ends[0].error == "first");
  REQUIRE(ends[0].exit_code == static_cast<int>(ExitCode::Data));
  REQUIRE(ends[1].error == "first");
  REQUIRE(first_counts);
  REQUIRE_FALSE(second_counts);
  auto lock = monitor.lock();
  REQUIRE_FALSE(monitor.found_failure_here());
  REQUIRE(monitor.wait_until(lock, monitor.now(), [] { return true; }));  // a result still counts
}

TEST_CASE("job monitor: the job is over once it fails or closes", "[control_plane]") {
  JobMonitor failing(0, 1s), closing(0, 1s);
  REQUIRE_FALSE(failing.is_over());
  failing.set_failure(cause_saying("here"), /*found_here=*/true);
  REQUIRE(failing.is_over());
  REQUIRE(failing.found_failure_here());
  closing.set_closing();
  REQUIRE(closing.is_over());
  REQUIRE_FALSE(closing.failed());
}

TEST_CASE("job monitor: its limits do not count a suspension", "[control_plane]") {
  JobMonitor monitor(0, 100ms);
  const auto start = Clock::now();
  const auto before = monitor.tick(start);
  REQUIRE(monitor.tick(start + 50ms) - before == 50ms);
  REQUIRE(monitor.tick(start + 10s) - before == 150ms);
}

// Counts what the loop reports. `on_serve` runs in each turn.
struct LoopRecord final : EventLoop::Handler {
  std::chrono::milliseconds prepare(std::vector<pollfd>& watched) override {
    watched.push_back({socket, POLLIN, 0});
    return timeout;
  }
  void serve(std::unique_lock<std::mutex>& lock, const std::vector<pollfd>& watched,
             Clock::time_point) override {
    num_ready += (watched.at(1).revents & POLLIN) != 0 ? 1 : 0;
    ++num_turns;
    on_serve(lock);
  }
  void end_by_exception(const std::string& what) override { ended.set_value(what); }

  int socket = -1;
  std::chrono::milliseconds timeout{60'000};
  std::atomic<int> num_turns{0}, num_ready{0};
  std::function<void(std::unique_lock<std::mutex>&)> on_serve = [](auto&) {};
  std::promise<std::string> ended;
};

bool comes_true(const std::function<bool()>& condition) {
  for (const auto start = Clock::now(); seconds_since(start) < 10;) {
    if (condition()) {
      return true;
    }
    std::this_thread::sleep_for(1ms);
  }
  return false;
}

TEST_CASE("event loop: it serves a ready socket, a wake-up and a timeout", "[control_plane]") {
  std::mutex mutex;
  WakeEvent wake;
  LoopRecord record;
  const detail::UniqueFd ready(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  record.socket = ready.get();
  bool locked = true, of_loop = true;
  EventLoop loop(mutex, wake, record);
  record.on_serve = [&](std::unique_lock<std::mutex>& lock) {
    locked = locked && lock.owns_lock();
    of_loop = of_loop && loop.is_current_thread();
    lock.unlock();
    lock.lock();
  };
  loop.start();
  REQUIRE_FALSE(loop.is_current_thread());

  wake.notify();
  REQUIRE(comes_true([&] { return record.num_turns == 1; }));
  std::this_thread::sleep_for(20ms);
  REQUIRE(record.num_turns == 1);  // the wake-up was taken
  REQUIRE(record.num_ready == 0);

  eventfd_write(ready.get(), 1);
  REQUIRE(comes_true([&] { return record.num_ready > 0; }));
  {
    const std::lock_guard lock(mutex);
    eventfd_t unread = 0;
    eventfd_read(ready.get(), &unread);
    record.timeout = 1ms;
  }
  wake.notify();  // the loop may wait for the socket with the timeout of before
  const int turns = record.num_turns;
  REQUIRE(comes_true([&] { return record.num_turns > turns + 5; }));
  const auto start = Clock::now();
  loop.stop();
  REQUIRE(seconds_since(start) < 5);
  const int last = record.num_turns;
  std::this_thread::sleep_for(10ms);
  REQUIRE(record.num_turns == last);
  REQUIRE(locked);
  REQUIRE(of_loop);
}

TEST_CASE("event loop: an exception ends it and is reported without the mutex", "[control_plane]") {
  std::mutex mutex;
  WakeEvent wake;
  LoopRecord record;
  record.on_serve = [](auto&) { throw std::runtime_error("a broken handler"); };
  EventLoop loop(mutex, wake, record);
  loop.start();
  wake.notify();
  REQUIRE(record.ended.get_future().get() == "a broken handler");
  REQUIRE(mutex.try_lock());
  mutex.unlock();
}

TEST_CASE("progress: the sender is notified once until it takes the newest", "[control_plane]") {
  WakeEvent wake;
  ProgressTracker progress(&wake, 10ms);
  const auto now = Clock::now();
  REQUIRE_FALSE(progress.due());
  progress.set(3, "forward");
  REQUIRE(is_notified(wake));
  wake.drain();
  progress.set(3, "backward");
  REQUIRE_FALSE(is_notified(wake));
  REQUIRE(progress.due());
  const auto sent = progress.take_due(now);
  REQUIRE(sent);
  REQUIRE(sent->step == 3);
  REQUIRE(sent->where == "backward");
  REQUIRE_FALSE(progress.take_due(now + 1s));  // nothing new

  progress.set(3, "backward");
  REQUIRE_FALSE(is_notified(wake));
  progress.set(4, "");
  REQUIRE(is_notified(wake));
  REQUIRE(progress.due() == now + 10ms);
  REQUIRE_FALSE(progress.take_due(now + 9ms));
  REQUIRE(progress.take_due(now + 10ms)->step == 4);
}

TEST_CASE("progress: an activity is part of the place", "[control_plane]") {
  ProgressTracker progress(nullptr, 10ms);  // rank 0 sends nothing
  progress.set(1, "epoch 2");
  REQUIRE(progress.set_activity("save").empty());
  REQUIRE(progress.get().where == "epoch 2, save");
  REQUIRE(progress.activity() == "save");
  progress.set(1, "");
  REQUIRE(progress.get().where == "save");
  REQUIRE(progress.set_activity("") == "save");
  REQUIRE(progress.get().where.empty());
  REQUIRE_FALSE(progress.due());
}

TEST_CASE("position watch: a wait is sent once it stands, once per heartbeat, and at its end",
          "[control_plane]") {
  const ProgressTracker progress(nullptr, 10ms);
  PositionReporter reporter(progress, 1s);  // looks every 50 ms
  auto now = Clock::now();
  const auto next_message = [&] {
    now += 50ms;
    return reporter.poll(now);
  };
  REQUIRE_FALSE(next_message());
  REQUIRE_FALSE(next_message());  // the rank does not wait
  reporter.begin_plane_call(6);
  REQUIRE_FALSE(next_message());
  REQUIRE_FALSE(reporter.poll(now + 49ms));  // too early
  const auto first = next_message();
  REQUIRE(first);
  REQUIRE(first->plane_call == 7);
  for (int look = 0; look < 19; ++look) {
    REQUIRE_FALSE(next_message());
  }
  REQUIRE(next_message() == first);
  reporter.end_plane_call();
  const auto last = next_message();
  REQUIRE(last);
  REQUIRE_FALSE(last->waits());
  REQUIRE_FALSE(next_message());
}

TEST_CASE("position watch: it asks every communicator until that is gone", "[control_plane]") {
  const ProgressTracker progress(nullptr, 10ms);
  PositionReporter reporter(progress, 1s);
  auto now = Clock::now();
  int num_asked = 0;
  bool is_gone = false;
  const auto caller = std::this_thread::get_id();
  reporter.add_plane_caller();
  reporter.begin_plane_call(0);
  reporter.add_probe([&]() -> detail::GroupPosition {
    ++num_asked;
    if (is_gone) {
      return {.id = "world", .num_called = 13, .is_closed = true};
    }
    return {.id = "world", .num_called = 12, .caller = caller};
  });
  REQUIRE_FALSE(reporter.poll(now));
  auto position = reporter.poll(now += 100ms);
  REQUIRE(position);
  REQUIRE(position->groups.size() == 1);
  REQUIRE(position->groups[0].num_called == 12);
  REQUIRE(position->one_thread);

  std::thread([&] { reporter.add_plane_caller(); }).join();
  REQUIRE_FALSE(reporter.poll(now += 100ms)->waits());  // the wait changed
  REQUIRE_FALSE(reporter.poll(now += 100ms)->one_thread);

  is_gone = true;
  reporter.poll(now += 100ms);
  const int asked = num_asked;
  reporter.poll(now += 100ms);
  REQUIRE(num_asked == asked);
  reporter.add_probe([&]() -> detail::GroupPosition {
    ++num_asked;
    return {};
  });
  reporter.remove_probes();
  reporter.poll(now += 100ms);
  REQUIRE(num_asked == asked);
}

TEST_CASE("position watch: the last counts of destroyed communicators stay", "[control_plane]") {
  const ProgressTracker progress(nullptr, 10ms);
  PositionReporter reporter(progress, 1s);
  auto now = Clock::now();
  reporter.add_plane_caller();
  reporter.begin_plane_call(0);
  const auto add_closed = [&](uint64_t number) {
    reporter.add_probe([number]() -> detail::GroupPosition {
      return {.id = std::to_string(number), .num_called = number, .is_closed = true};
    });
  };
  const auto next_position = [&] {
    for (;;) {
      if (auto position = reporter.poll(now += 100ms); position && position->waits()) {
        return *position;
      }
    }
  };
  add_closed(3);
  for (int look = 0; look < 3; ++look) {  // it is asked once
    const auto position = next_position();
    REQUIRE(position.groups.size() == 1);
    REQUIRE(position.groups[0].num_called == 3);
    REQUIRE(position.one_thread);
  }
  // Living communicators come first, then the newest of the destroyed ones.
  for (uint64_t number = 4; number < 4 + 2 * detail::kMaxPositionGroups; ++number) {
    add_closed(number);
  }
  reporter.add_probe([]() -> detail::GroupPosition { return {.id = "world"}; });
  reporter.poll(now += 100ms);
  const auto position = next_position();
  REQUIRE(position.groups[0].id == "world");
  REQUIRE(position.groups[1].id == std::to_string(3 + 2 * detail::kMaxPositionGroups));
  REQUIRE(position.groups.size() == 1 + detail::kMaxPositionGroups);
  reporter.remove_probes();
  reporter.poll(now += 100ms);
  REQUIRE(next_position().groups.empty());
}

TEST_CASE("progress: a training that announces no step is at an unknown one", "[control_plane]") {
  WakeEvent wake;
  ProgressTracker progress(&wake, 10ms);
  const auto now = Clock::now();
  REQUIRE(progress.get().step == -1);
  REQUIRE_FALSE(progress.take_due(now));
  detail::report_step(detail::kEvaluationForward);
  REQUIRE(progress.get().step == -1);
  detail::report_step(detail::kTrainingForward);
  REQUIRE(progress.get().step == detail::kUnknownStep);
  // Rank 0 is told although nothing woke the sender.
  const auto sent = progress.take_due(now);
  REQUIRE(sent);
  REQUIRE(sent->step == detail::kUnknownStep);
  REQUIRE_FALSE(progress.take_due(now + 1s));
  REQUIRE(ProgressTracker(nullptr, 10ms).get().step == -1);  // of a later context
  progress.set(4, "forward");
  REQUIRE(progress.get().step == 4);
}

TEST_CASE("pending replies: a result is complete with its last part", "[control_plane]") {
  ReplyStore replies;
  REQUIRE(replies.next_sequence() == 0);
  REQUIRE(replies.next_sequence() == 1);
  REQUIRE_FALSE(replies.has_result(0));
  REQUIRE_FALSE(replies.add_result({0, 2, 3, {"c"}}));
  REQUIRE_FALSE(replies.has_result(0));
  REQUIRE(replies.add_result({1, 0, 0, {}}));  // a barrier has no values
  REQUIRE(replies.has_result(1));
  REQUIRE(replies.add_result({0, 0, 3, {"a", "b"}}));
  REQUIRE(replies.has_result(0));
  REQUIRE(replies.take_result(0) == std::vector<std::string>{"a", "b", "c"});
  REQUIRE_FALSE(replies.has_result(0));
  REQUIRE(replies.take_result(1).empty());
}

TEST_CASE("pending replies: an exchange is taken by its key", "[control_plane]") {
  ReplyStore replies;
  REQUIRE_FALSE(replies.has_exchanged(7));
  replies.add_exchanged(7, {{1, "of 1"}, {3, "of 3"}});
  REQUIRE(replies.has_exchanged(7));
  REQUIRE_FALSE(replies.has_exchanged(8));
  REQUIRE(replies.take_exchanged(7).at(3) == "of 3");
  REQUIRE_FALSE(replies.has_exchanged(7));
}

}  // namespace
}  // namespace ddp::test
