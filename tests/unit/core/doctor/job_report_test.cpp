// SPDX-License-Identifier: Apache-2.0
// Reports of all ranks over a control plane: on request, at a failure, and with a rank that does
// not answer.
#include "core/control/doctor/job_report.hpp"

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <mutex>
#include <sstream>

#include "core/control/doctor/report_writer.hpp"
#include "core/control/rank_position.hpp"
#include "core/launch/place_in_loop.hpp"
#include "ddp/core/stop_signal.hpp"
#include "support/catch.hpp"
#include "support/stderr_of.hpp"
#include "unit/core/join_by_hand.hpp"

namespace ddp::test {
namespace {

using detail::CollectiveEntry;
using detail::CollectiveState;
using detail::GroupHistory;
using detail::GroupPosition;

constexpr const char* kCall = "all_reduce (sum of 8 Float)";

/// The file of the reports in its lifetime.
class ReportFile {
 public:
  ReportFile() {
    std::filesystem::remove(path_);
    setenv("DDP_DOCTOR_FILE", path_.c_str(), 1);
  }
  ~ReportFile() {
    unsetenv("DDP_DOCTOR_FILE");
    std::filesystem::remove(path_);
  }
  ReportFile(const ReportFile&) = delete;
  ReportFile& operator=(const ReportFile&) = delete;

  /// Waits for a report; empty if none comes.
  std::string text() const {
    for (const auto start = Clock::now(); Clock::now() - start < 10s;) {
      if (std::filesystem::exists(path_)) {
        std::ostringstream text;
        text << std::ifstream(path_).rdbuf();
        return text.str();
      }
      std::this_thread::sleep_for(5ms);
    }
    return {};
  }
  bool exists() const { return std::filesystem::exists(path_); }

 private:
  const std::filesystem::path path_ =
      std::filesystem::temp_directory_path() / concat("doctor_", getpid(), ".json");
};

// `number`: the last collective that this rank called; it waits in it unless it is 11.
void add_world(ControlPlane& plane, uint64_t number) {
  const auto position = [number] {
    return GroupPosition{.id = "world",
                         .num_called = number,
                         .pending = number == 11 ? 0 : number,
                         .operation = number == 11 ? "" : kCall,
                         .label = number == 11 ? "" : "bucket 4: a … b"};
  };
  const auto history = [number] {
    GroupHistory recent;
    for (uint64_t i = 1; i <= number; ++i) {
      recent.collectives.push_back(
          {.number = i,
           .operation = kCall,
           .label = "bucket 4: a … b",
           .state = i <= 11 ? CollectiveState::Ended : CollectiveState::Started,
           .enqueued_ms = 31'000});
    }
    return recent;
  };
  plane.position_board()->add_probe({position, history});
}

TEST_CASE("report: SIGUSR2 makes rank 0 name the rank that is absent") {
  const StopSignalHandlers handlers;
  const ReportFile file;
  std::string text;
  std::vector<RankEnd> ends;
  const auto told = ::testing::stderr_of([&] {
    ends = run_ranks(3, [&](ControlPlane& plane) {
      plane.set_progress(5, plane.rank() == 1 ? "save" : "backward");
      add_world(plane, plane.rank() == 1 ? 11 : 12);
      plane.barrier();
      if (plane.rank() == 0) {
        raise(SIGUSR2);
        text = file.text();
      }
      plane.barrier();
    });
  });
  for (const auto& end : ends) {
    REQUIRE(end.error.empty());  // the job goes on
  }
  REQUIRE_FALSE(stop_requested());
  CHECK_THAT(told, Catch::Contains("doctor: rank 1 (") &&
                       Catch::Contains(") did not enter all_reduce #12 (sum of 8 Float; bucket 4: "
                                       "a … b); it ") &&
                       Catch::Contains("; ranks 0, 2 wait since 31 s") &&
                       Catch::Contains("report of all ranks: "));
  CHECK_THAT(text, Catch::Contains("\"reason\": \"request\"") &&
                       Catch::Contains("\"number\": 12") && Catch::Contains("\"where\": \"save") &&
                       !Catch::Contains("\"answered\": false"));
}

TEST_CASE("report: without a file the log has one line a rank") {
  const StopSignalHandlers handlers;
  const auto told = ::testing::stderr_of([&] {
    run_ranks(2, [&](ControlPlane& plane) {
      plane.set_progress(5, "");
      add_world(plane, plane.rank() == 1 ? 11 : 12);
      plane.barrier();
      if (plane.rank() == 1) {  // any rank asks rank 0
        raise(SIGUSR2);
        std::this_thread::sleep_for(1s);
      }
      plane.barrier();
    });
  });
  CHECK_THAT(told,
             Catch::Contains("doctor: rank 1 (") &&
                 Catch::Contains(") is at step 5; world: 12 called, in all_reduce #12 (sum") &&
                 Catch::Contains(") is at step 5; world: 11 called\n"));
}

TEST_CASE("report: a failure's report has the ranks as they were before it") {
  const ReportFile file;
  std::vector<RankEnd> ends;
  const auto told = ::testing::stderr_of([&] {
    ends = run_ranks(3, [&](ControlPlane& plane) {
      plane.set_progress(5, "");
      add_world(plane, plane.rank() == 1 ? 11 : 12);
      plane.barrier();
      if (plane.rank() == 2) {  // its watchdog gives up
        FailureCause cause;
        cause.message = "all_reduce #12 did not end within 31000 ms";
        plane.publish_failure(cause);
      }
      while (!plane.failed()) {
        std::this_thread::sleep_for(5ms);
      }
      throw Error(plane.failure().exit_code, plane.failure().to_line());
    });
  });
  for (const auto& end : ends) {
    REQUIRE(end.exit_code == static_cast<int>(ExitCode::PeerLost));
  }
  CHECK_THAT(
      told, Catch::Contains("doctor: rank 1 (") && Catch::Contains("; ranks 0, 2 wait since 31 s"));
  CHECK_THAT(file.text(), Catch::Contains("\"reason\": \"failure\"") &&
                              Catch::Contains("\"first_cause\": \"rank 2 (") &&
                              !Catch::Contains("\"answered\": false"));
}

TEST_CASE("report: the error of a program has a file and no verdict") {
  const ReportFile file;
  const auto told = ::testing::stderr_of([&] {
    run_ranks(2, [&](ControlPlane& plane) {
      add_world(plane, plane.rank() == 1 ? 11 : 12);
      plane.barrier();
      if (plane.rank() == 1) {
        FailureCause cause;
        cause.message = "my bug";
        cause.exit_code = ExitCode::UserException;
        plane.publish_failure(cause);
      }
      while (!plane.failed()) {
        std::this_thread::sleep_for(5ms);
      }
    });
  });
  CHECK_THAT(told, !Catch::Contains("doctor: "));
  CHECK_THAT(file.text(), Catch::Contains("my bug"));
}

TEST_CASE("report: a deadlock's verdict is logged where it names an earlier call") {
  const ReportFile file;
  FailureCause cause;
  cause.message = "ranks diverged";
  cause.exit_code = ExitCode::Mismatch;
  detail::JobReport report;
  report.cause = cause;
  report.verdict = {.kind = detail::VerdictKind::OtherOperation, .ranks = {1}, .text = "a verdict"};
  CHECK(::testing::num_found(::testing::stderr_of([&] { publish_report(report); }),
                             "doctor: a verdict") == 1);
  report.verdict.is_certain = true;
  CHECK(::testing::num_found(::testing::stderr_of([&] { publish_report(report); }), "doctor: ") ==
        0);
}

TEST_CASE("report: a file system that hangs keeps nobody waiting") {
  std::promise<void> back;
  std::mutex mutex;
  std::vector<std::string> written;
  const auto report_of = [](const std::string& text) {
    detail::JobReport report;
    report.verdict.text = text;
    return report;
  };
  const auto start = Clock::now();
  {
    detail::ReportWriter writer(
        [&, hangs = back.get_future().share()](const detail::JobReport& report) {
          {
            const std::lock_guard lock(mutex);
            written.push_back(report.verdict.text);
          }
          hangs.wait();
          throw std::runtime_error("no space left");  // must not end the process
        },
        300ms);
    writer.publish(report_of("first"));
    while (std::lock_guard(mutex), written.empty()) {
      std::this_thread::sleep_for(1ms);
    }
    writer.publish(report_of("second"));
    writer.publish(report_of("third"));
    REQUIRE(Clock::now() - start < 250ms);
  }
  REQUIRE(Clock::now() - start < 2s);  // the destructor gave up
  back.set_value();
  const auto has_all = [&] { return std::lock_guard(mutex), written.size() == 2; };
  for (const auto end = Clock::now() + 5s; Clock::now() < end && !has_all();) {
    std::this_thread::sleep_for(1ms);
  }
  const std::lock_guard lock(mutex);
  CHECK(written == std::vector<std::string>{"first", "third"});  // the latest wins
  std::this_thread::sleep_for(50ms);                             // the thread ends
}

// The last rank is driven by hand: it joins, and answers nothing.
TEST_CASE("report: a rank that does not answer is reported as such") {
  const StopSignalHandlers handlers;
  const ReportFile file;
  const auto rendezvous = std::make_shared<LocalRendezvous>();
  std::string text;
  int num_requests = 0;
  const auto by_hand = [&] {
    auto hub = join_by_hand(address_of(*rendezvous), launch_of(2, 3), "node2");
    for (const auto start = Clock::now(); Clock::now() - start < 2s && num_requests == 0;) {
      for (const auto& frame : std::exchange(hub.frames, {})) {
        num_requests += frame.type == detail::FrameType::ReportRequest ? 1 : 0;
      }
      hub.channel.receive(hub.frames);
      std::this_thread::sleep_for(5ms);
    }
    text = file.text();
  };
  const auto rank = [&](int number) {
    const auto plane =
        detail::create_control_plane(launch_of(number, 3), rendezvous, fast_options());
    add_world(*plane, 12);
    if (number == 0) {
      std::this_thread::sleep_for(600ms);  // later it was silent for two heartbeats
      raise(SIGUSR2);
    }
    while (!plane->failed()) {  // the rank by hand leaves without a word
      std::this_thread::sleep_for(5ms);
    }
  };
  const auto told = ::testing::stderr_of([&] {
    run_threads({by_hand, [&] { rank(0); }, [&] { rank(1); }});
  });
  REQUIRE(num_requests == 1);
  CHECK_THAT(told,
             Catch::Contains(") hears nothing from node2 (rank 2): its processes are stopped") &&
                 Catch::Contains("; ranks 0-1 wait since 31 s"));
  CHECK_THAT(text,
             Catch::Contains("\"answered\": false") && Catch::Contains("\"kind\": \"dead link\""));
}

TEST_CASE("report: ages do not count the time of a suspension") {
  const detail::ProgressTracker progress(nullptr, 10ms);
  detail::PositionReporter reporter(progress, 1s);
  const auto history = [] {
    GroupHistory recent;
    recent.collectives = {{.number = 1, .enqueued_ms = 28'000, .ended_ms = 3'000},
                          {.number = 2, .enqueued_ms = 4'000}};
    recent.graphs = {{.waited_ms = 28'000}};
    return recent;
  };
  reporter.add_probe({[] { return GroupPosition{.id = "world"}; }, history});
  const auto now = Clock::now();
  reporter.poll(now - 30s);
  reporter.poll(now - 29500ms);
  reporter.poll(now - 5s);  // suspended for 23.5 s
  for (auto time = now - 4500ms; time < now; time += 500ms) {
    reporter.poll(time);
  }
  const auto report = reporter.report(now);
  const auto& calls = report.histories[0].collectives;
  CHECK(calls[0].enqueued_ms == 4'500);
  CHECK(calls[0].ended_ms == 3'000);
  CHECK(calls[0].started_ms == detail::kUnknownAge);
  CHECK(calls[1].enqueued_ms == 4'000);
  CHECK(report.histories[0].graphs[0].waited_ms == 4'500);
}

TEST_CASE("loader: a long wait is the place of a rank, a short one is not") {
  CHECK(detail::long_batch_wait().empty());
  {
    const detail::BatchWait wait(406, 2);
    CHECK(detail::long_batch_wait().empty());
    std::this_thread::sleep_for(1100ms);
    CHECK(detail::long_batch_wait() == "loader, waiting for batch 406 of epoch 2");
    {
      const detail::BatchWait another(3, 0);  // of another loader
      CHECK(detail::long_batch_wait() == "loader, waiting for batch 406 of epoch 2");
    }
    CHECK(detail::long_batch_wait() == "loader, waiting for batch 406 of epoch 2");
    detail::record_phase("backward");
    detail::ProgressTracker progress(nullptr, 10ms);
    CHECK(progress.get().where == "loader, waiting for batch 406 of epoch 2");
    progress.set(3, "training");
    CHECK(progress.get().where == "training, loader, waiting for batch 406 of epoch 2");
    progress.set_activity("save");
    CHECK(progress.get().where == "training, save");
  }
  CHECK(detail::long_batch_wait().empty());
  detail::ProgressTracker progress(nullptr, 10ms);
  CHECK(progress.get().where == "backward");
  progress.set(3, "training");
  CHECK(progress.get().where == "training");
}

}  // namespace
}  // namespace ddp::test
