// SPDX-License-Identifier: Apache-2.0
// Ownership of a folder that a process writes to, as seen by other processes.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "ddp/core/stop_signal.hpp"
#include "support/catch.hpp"
#include "train/checkpoint/folder_owner.hpp"
#include "unit/train/temporary_folder.hpp"

namespace {

using namespace std::chrono_literals;
using ddp::detail::FolderOwner;
using ddp::detail::FolderTakenError;
using ddp::detail::OwnerRecord;
using ddp::detail::OwnerTimes;
using testing::TemporaryFolder;

// A loaded machine may delay a beat: a living process must not be declared dead.
constexpr OwnerTimes kPatient{.beat = 50ms, .watch = 5s, .wait = 500ms};
constexpr OwnerTimes kHasty{.beat = 50ms, .watch = 300ms, .wait = 500ms};

std::shared_ptr<FolderOwner> take(const std::string& folder, const OwnerTimes& times,
                                  const std::string& job = "") {
  return FolderOwner::take(
      ddp::system_file_ops(),
      {.path = folder, .words = "the folder " + folder, .fix = "name another folder", .job = job},
      times);
}

std::string record_in(const std::string& folder) {
  return folder + "/" + ddp::detail::kOwnerName;
}

// A child process, killed at the end of the test.
class Process {
 public:
  explicit Process(const std::function<void()>& body) : pid_(fork()) {
    if (pid_ == 0) {
      try {
        body();
      } catch (const FolderTakenError& error) {
        _exit(static_cast<int>(error.exit_code()));
      } catch (const std::exception&) {
        _exit(99);
      }
      _exit(0);
    }
  }
  ~Process() { kill(); }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  void kill() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      wait();
    }
  }
  int wait() {
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_;
};

void wait_for_record(const std::string& folder) {
  for (int i = 0; i < 500 && !std::filesystem::exists(record_in(folder)); ++i) {
    std::this_thread::sleep_for(10ms);
  }
  REQUIRE(std::filesystem::exists(record_in(folder)));
}

std::string refusal(const std::string& folder, const OwnerTimes& times,
                    const std::string& job = "") {
  try {
    take(folder, times, job);
  } catch (const FolderTakenError& error) {
    REQUIRE(error.exit_code() == ddp::ExitCode::Settings);
    return error.what();
  }
  return "";
}

double seconds_of(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

TEST_CASE("a folder without a record is taken at once and released without one") {
  TemporaryFolder folder;
  for (int i = 0; i < 2; ++i) {
    std::shared_ptr<FolderOwner> owner, again;
    // The times of a real run: no wait happens.
    CHECK(seconds_of([&] { owner = take(folder.path(), {}); }) < 4);
    CHECK(std::filesystem::exists(record_in(folder.path())));
    CHECK(seconds_of([&] { again = take(folder.path() + "/.", {}); }) < 4);
    CHECK(again == owner);  // the same process
    owner->require_own();
  }
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("a live owner is named and keeps its folder") {
  TemporaryFolder folder;
  Process first([&] {
    const auto owner = take(folder.path(), kPatient, "77");
    std::this_thread::sleep_for(60s);
  });
  wait_for_record(folder.path());
  const auto message = refusal(folder.path(), kPatient, "78");
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  CHECK_THAT(message,
             Catch::Contains("the folder " + folder.path() + " is in use by host \"" + host +
                             "\", job \"77\", process " + std::to_string(first.pid())) &&
                 Catch::Contains("fix: end that job first, or name another folder"));
  CHECK(OwnerRecord::parse(testing::read_file(record_in(folder.path()))).process == first.pid());
}

TEST_CASE("the folder of a process that was killed is taken over without waiting") {
  TemporaryFolder folder;
  {
    Process first([&] {
      const auto owner = take(folder.path(), kPatient);
      std::this_thread::sleep_for(60s);
    });
    wait_for_record(folder.path());
  }
  std::shared_ptr<FolderOwner> owner;
  CHECK(seconds_of([&] { owner = take(folder.path(), kPatient); }) < 4);
  owner->require_own();
}

TEST_CASE(
    "an owner on another host is dead when its counter stands still, whatever its record holds",
    "[waits]") {
  TemporaryFolder folder;
  const OwnerRecord elsewhere{.host = "node9", .process = 1, .machine = "other", .start = "a"};
  for (const auto& text :
       {elsewhere.to_text(), std::string(), std::string("{"), std::string(5000, '['),
        std::string(R"({"host":3})"), std::string("\0\xff\n", 3),
        std::string(
            R"({"host":"","job":"","process":1e300,"machine":"","ending":false,"start":"x"})")}) {
    testing::write_file(record_in(folder.path()), text);
    std::shared_ptr<FolderOwner> owner;
    CHECK(seconds_of([&] { owner = take(folder.path(), kHasty); }) >= 0.3);
    owner->require_own();
    CHECK(OwnerRecord::parse(testing::read_file(record_in(folder.path()))).process == getpid());
  }
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("a start waits, for a limited time, for an owner that is ending or of the same job",
          "[waits]") {
  TemporaryFolder folder;
  const bool ending = GENERATE(false, true), ends = GENERATE(false, true);
  Process first([&] {
    if (ending) {
      ddp::request_stop();
    }
    const auto owner = take(folder.path(), kPatient, "77");
    std::this_thread::sleep_for(ends ? 400ms : 60s);
  });
  wait_for_record(folder.path());
  auto times = kPatient;
  times.wait = ends ? 20'000ms : 500ms;
  const auto message = refusal(folder.path(), times, ending ? "78" : "77");
  if (ends) {
    CHECK(message == "");
    CHECK(first.wait() == 0);
  } else {
    CHECK_THAT(message, Catch::Contains("is in use by"));
  }
}

// Without the request, both waits take a minute.
TEST_CASE("a stop request ends the wait for another owner, and the error requests another start",
          "[waits]") {
  constexpr OwnerTimes kLong{.beat = 50ms, .watch = 60s, .wait = 60s};
  TemporaryFolder folder;
  const bool lives = GENERATE(true, false), before = GENERATE(true, false);
  std::optional<Process> first;
  if (lives) {
    first.emplace([&] {
      const auto owner = take(folder.path(), kLong, "77");
      std::this_thread::sleep_for(60s);
    });
    wait_for_record(folder.path());
  } else {
    const OwnerRecord elsewhere{
        .host = "node9", .job = "77", .process = 1, .machine = "other", .start = "a"};
    testing::write_file(record_in(folder.path()), elsewhere.to_text());
  }
  Process second([&] {
    const ddp::StopSignalHandlers handlers;
    if (before) {
      ddp::request_stop();
    }
    try {
      take(folder.path(), kLong, "77");
    } catch (const FolderTakenError& error) {
      testing::write_file(folder.file("message"), error.what());
      throw;
    }
  });
  std::this_thread::sleep_for(500ms);  // until it waits
  CHECK(seconds_of([&] {
          ::kill(second.pid(), before ? 0 : SIGTERM);
          CHECK(second.wait() == static_cast<int>(ddp::ExitCode::SavedRequeue));
        }) < 4);
  CHECK_THAT(testing::read_file(folder.file("message")),
             Catch::Contains("a stop was requested while this process waited for the folder " +
                             folder.path() + ", which is in use by host ") &&
                 Catch::Contains("job \"77\"") && Catch::Contains("fix: start the run again"));
  CHECK(std::filesystem::exists(record_in(folder.path())));
}

TEST_CASE("one of two processes that take over a folder wins", "[waits]") {
  TemporaryFolder folder;
  const OwnerRecord dead{.host = "node9", .process = 1, .machine = "other", .start = "a"};
  testing::write_file(record_in(folder.path()), dead.to_text());
  // The winner stays until the other process has seen it.
  const auto contend = [&] {
    const auto owner = take(folder.path(), {.beat = 80ms, .watch = 400ms, .wait = 0ms});
    std::this_thread::sleep_for(1500ms);
    owner->require_own();
  };
  Process one(contend), other(contend);
  const std::vector<int> codes{one.wait(), other.wait()};
  CHECK((codes == std::vector<int>{0, 64} || codes == std::vector<int>{64, 0}));
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("a suspended owner that lost its folder reports this and does not change the record") {
  TemporaryFolder folder;
  const OwnerRecord successor{
      .host = "node9", .job = "80", .process = 5, .machine = "other", .start = "a"};
  {
    const auto owner = take(folder.path(), kPatient);
    testing::write_file(record_in(folder.path()), successor.to_text());
    try {
      owner->require_own();
      FAIL("no exception");
    } catch (const FolderTakenError& error) {
      CHECK(error.exit_code() == ddp::ExitCode::CannotWrite);
      CHECK_THAT(error.what(),
                 Catch::Contains("was taken over by host \"node9\", job \"80\", process 5"));
    }
    for (int i = 0; i < 500 && !owner->lost(); ++i) {
      std::this_thread::sleep_for(10ms);
    }
    CHECK(owner->lost());
  }
  CHECK(testing::read_file(record_in(folder.path())) == successor.to_text());
}
