// SPDX-License-Identifier: Apache-2.0
#include "ddp/core/stop_signal.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <thread>

#include "core/exchange_pace.hpp"
#include "core/failure_cause.hpp"
#include "core/message_codec.hpp"
#include "support/catch.hpp"

namespace ddp {
namespace {

// All ranks of a job as threads of this process; counts the collectives.
class Meeting {
 public:
  explicit Meeting(int world_size) : values_(static_cast<std::size_t>(world_size)) {}

  std::vector<std::string> all_gather(int rank, const std::string& value) {
    std::unique_lock lock(mutex_);
    values_[static_cast<std::size_t>(rank)] = value;
    const int round = num_rounds;
    if (++arrived_ == static_cast<int>(values_.size())) {
      arrived_ = 0;
      result_ = values_;
      ++num_rounds;
      all_here_.notify_all();
    }
    all_here_.wait(lock, [&] { return num_rounds != round; });
    return result_;
  }

  int world_size() const { return static_cast<int>(values_.size()); }
  int num_rounds = 0;

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  std::vector<std::string> values_, result_;
  int arrived_ = 0;
};

// Implements only the calls of StopSignal; `own_request` replaces the process's flag on this rank.
class ThreadPlane final : public ControlPlane {
 public:
  ThreadPlane(Meeting& meeting, int rank) : meeting_(meeting), rank_(rank) {}
  int rank() const override { return rank_; }
  int world_size() const override { return meeting_.world_size(); }
  std::vector<std::string> all_gather(const std::string& value) override {
    // The flag is the process's, all ranks are in this process: keep it only on the chosen rank.
    auto [signal, interval] = detail::decode_message<std::pair<int, int64_t>>(value);
    signal = own_request ? SIGUSR1 : 0;
    return meeting_.all_gather(rank_, detail::encode_message(std::pair(signal, interval)));
  }
  std::string broadcast(const std::string& value, int) override { return value; }
  void barrier() override {}
  void set_progress(int64_t, const std::string&) override {}
  void publish_failure(const FailureCause&) override {}
  bool failed() const override { return false; }
  FailureCause failure() const override { return {}; }
  int add_failure_callback(std::function<void(const FailureCause&)>) override { return 0; }
  void remove_failure_callback(int) override {}
  void close() override {}

  std::atomic<bool> own_request{false};

 private:
  Meeting& meeting_;
  int rank_;
};

template <typename F>
int exit_status_of(F&& child) {
  const pid_t pid = fork();
  if (pid == 0) {
    for (const int number : {SIGTERM, SIGUSR1, SIGINT}) {
      signal(number, SIG_DFL);  // Catch2 has its own handlers
    }
    child();
    _exit(99);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return status;
}

}  // namespace

TEST_CASE("Ctrl-C leaves errno as the interrupted code had it") {
  const int status = exit_status_of([] {
    const StopSignalHandlers handlers;
    close(STDERR_FILENO);  // the handler's own write fails
    errno = ENOENT;
    raise(SIGINT);
    _exit(errno == ENOENT ? 0 : 1);
  });
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("a signal only sets the flag, and the old handlers come back") {
  const int status = exit_status_of([] {
    {
      StopSignalHandlers handlers;
      Meeting meeting(1);
      ThreadPlane plane(meeting, 0);
      StopSignal stop(plane);
      if (stop_requested() || stop.should_stop()) _exit(1);
      raise(SIGUSR1);
      raise(SIGTERM);
      raise(SIGTERM);
      if (!stop_requested() || !stop.should_stop()) _exit(2);
      if (stop.reason() != "rank 0 received SIGUSR1") _exit(3);
      clear_stop_request();
      if (stop_requested() || !stop.should_stop()) _exit(4);
    }
    raise(SIGTERM);
  });
  CHECK(WIFSIGNALED(status));
  CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM));
}

TEST_CASE("the second Ctrl-C leaves at once") {
  const int status = exit_status_of([] {
    close(STDERR_FILENO);
    StopSignalHandlers handlers;
    raise(SIGINT);
    if (!stop_requested()) _exit(1);
    raise(SIGINT);
  });
  CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGINT));
}

TEST_CASE("all ranks stop in the same call, wherever the signal came") {
  constexpr int kRanks = 3;
  Meeting meeting(kRanks);
  std::vector<int> stopped_at(kRanks, -1);
  std::vector<std::string> reasons(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      ThreadPlane plane(meeting, rank);
      StopSignal stop(plane, std::chrono::milliseconds(5));
      for (int step = 0; step < 5000 && stopped_at[rank] < 0; ++step) {
        if (rank == 1 && step == 57) {
          plane.own_request = true;
        }
        if (stop.should_stop()) {
          stopped_at[rank] = step;
          reasons[rank] = stop.reason();
        }
        std::this_thread::sleep_for(std::chrono::microseconds(20 * (rank + 1)));
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  CHECK(stopped_at[0] >= 57);
  CHECK(stopped_at[1] == stopped_at[0]);
  CHECK(stopped_at[2] == stopped_at[0]);
  CHECK(reasons[0] == "rank 1 received SIGUSR1");
  CHECK(reasons[2] == reasons[0]);
}

TEST_CASE("ranks ask each other by time, not in every step") {
  Meeting meeting(2);
  constexpr int kSteps = 2000;
  std::atomic<int> num_stops{0};
  const auto loop = [&](int rank) {
    ThreadPlane plane(meeting, rank);
    StopSignal stop(plane, std::chrono::seconds(10));
    for (int step = 0; step < kSteps; ++step) {
      num_stops += stop.should_stop() ? 1 : 0;
    }
  };
  std::thread other([&] { loop(1); });
  loop(0);
  other.join();
  CHECK(num_stops == 0);
  CHECK(meeting.num_rounds >= 2);
  CHECK(meeting.num_rounds <= 8);  // after 1, 4, 16, … steps
}

TEST_CASE("where asking takes long, ranks ask less often") {
  using Pace = detail::ExchangePace;
  const Pace::Seconds interval(1.0);
  Pace pace;
  CHECK(pace.pause(interval).count() == 1.0);
  pace.note(Pace::Seconds(0.004));  // the first one counts only together with a second one
  CHECK(pace.pause(interval).count() == 1.0);
  pace.note(Pace::Seconds(0.005));
  CHECK(pace.pause(interval).count() == 1.0 - 0.004);
  pace.note(Pace::Seconds(0.060));
  CHECK(pace.pause(interval).count() == 1.0 - 0.005);  // waiting for a slow rank is not a cost
  pace.note(Pace::Seconds(0.060));
  CHECK(pace.pause(interval).count() == 49 * 0.060);
  pace.note(Pace::Seconds(1.6));
  pace.note(Pace::Seconds(1.6));
  CHECK(pace.pause(interval).count() == 5.0);
}

}  // namespace ddp
