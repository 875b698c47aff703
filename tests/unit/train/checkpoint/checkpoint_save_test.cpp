// SPDX-License-Identifier: Apache-2.0
// When saves happen, and the effects of failures.
#include <fcntl.h>
#include <torch/torch.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <stdexcept>
#include <thread>

#include "ddp/train/checkpoint.hpp"
#include "support/catch.hpp"
#include "train/checkpoint/checkpoint_impl.hpp"
#include "unit/train/checkpoint/checkpoint_objects.hpp"
#include "unit/train/thread_control_plane.hpp"

using ddp::StateDict;
using ddp::detail::CheckpointerImpl;
using testing::Box;
using testing::message_of;
using testing::names_in;
using testing::options_in;
using testing::run_ranks;
using testing::small_model;
using testing::TemporaryFolder;
using testing::ThreadControlPlane;
using testing::ThreadJob;

namespace {

// A disk that is full if `full` is set.
struct FullDisk : ddp::FileOps {
  std::atomic<bool> full = false;
  ssize_t write(int fd, const void* data, std::size_t size) override {
    if (full) {
      errno = ENOSPC;
      return -1;
    }
    return FileOps::write(fd, data, size);
  }
};

// The rank that wait() blames; -1 if everything is saved.
template <typename Checkpointer>
int rank_blamed(Checkpointer& checkpointer) {
  try {
    checkpointer.wait();
  } catch (const ddp::detail::SaveFailure& failure) {
    return failure.rank;
  }
  return -1;
}

int blamed(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const ddp::detail::SaveFailure& failure) {
    return failure.rank;
  }
}

}  // namespace

TEST_CASE("a full disk on one rank fails the save on all; training continues, then ends with 73") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.max_failures = 2;
  FullDisk disks[2];
  const int victim = GENERATE(0, 1);
  const auto errors = run_ranks(2, [&](ddp::ControlPlane& plane) {
    Box model("model", {.tensors = {{"w", torch::arange(1000)}}, .values = {}});
    CheckpointerImpl checkpointer(plane, at::kCPU, options, {model}, disks[plane.rank()]);
    checkpointer.save(0, {});
    checkpointer.wait();
    plane.barrier();
    disks[victim].full = true;
    plane.barrier();
    checkpointer.save(1, {});
    REQUIRE(rank_blamed(checkpointer) == victim);  // failure 1
    REQUIRE(checkpointer.last_saved_step() == 1);
    plane.barrier();
    disks[victim].full = false;
    plane.barrier();
    checkpointer.save(2, {});
    checkpointer.wait();  // works again: the count restarts
    REQUIRE(checkpointer.last_saved_step() == 3);
    plane.barrier();
    disks[victim].full = true;
    plane.barrier();
    checkpointer.save(3, {});
    REQUIRE(rank_blamed(checkpointer) == victim);  // failure 1
    checkpointer.save(4, {});
    checkpointer.wait();  // failure 2: throws on all ranks
  });
  for (const auto& error : errors) {
    REQUIRE_THAT(
        message_of<ddp::WriteError>(error),
        Catch::Contains("No space left") && Catch::Contains("failure 2 of at most 2") &&
            Catch::Contains("rank " + std::to_string(victim) + ": cannot write " + options.dir) &&
            Catch::Contains("fix: free space there, or set another checkpoint.dir"));
    REQUIRE(blamed(error) == victim);
  }
  REQUIRE(names_in(options.dir) == std::vector<std::string>{"step_0000000003", "step_0000000001"});
  REQUIRE(std::distance(std::filesystem::directory_iterator(options.dir), {}) == 2);
}

TEST_CASE("a stop request on one rank makes all save after the same step and end with 75") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.stop_check_seconds = 0.05;
  std::array<int64_t, 3> last_step{-1, -1, -1}, told{-1, -1, -1}, saved{-1, -1, -1};
  std::array<bool, 3> left_early{};
  std::atomic<bool> written = false;
  const auto errors = run_ranks(3, [&](ddp::ControlPlane& plane) {
    auto model = small_model();
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
    int64_t step = 0;
    checkpointer.set_stop_check([&] { return plane.rank() == 2 && step >= 40; });
    checkpointer.set_before_stop([&](int64_t steps_done) {
      told[plane.rank()] = steps_done;
      saved[plane.rank()] = checkpointer.last_saved_step();
      if (plane.rank() == 0) {  // still writing: the others must not leave yet
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        written = true;
      }
    });
    for (step = checkpointer.restore(); step < 5000; ++step) {
      last_step[plane.rank()] = step;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      try {
        checkpointer.save_if_due(step);
      } catch (const ddp::Stop&) {
        left_early[plane.rank()] = !written;
        throw;
      }
    }
  });
  for (const auto& error : errors) {
    REQUIRE_THAT(message_of<ddp::Stop>(error), Catch::Contains("rank 2 was asked to stop"));
  }
  REQUIRE(last_step[0] >= 40);
  REQUIRE(last_step[0] < 1000);
  REQUIRE(last_step == std::array{last_step[0], last_step[0], last_step[0]});
  const auto done = last_step[0] + 1;
  REQUIRE(told == std::array{done, done, done});
  REQUIRE(saved == told);  // the checkpoint comes first
  REQUIRE(left_early == std::array{false, false, false});
  REQUIRE(ddp::detail::list_checkpoints(options.dir).front().step == last_step[0] + 1);
}

TEST_CASE("a stop without checkpoint.dir reports that nothing was saved") {
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  auto model = small_model();
  ddp::Checkpointer checkpointer(plane, at::kCPU, {}, {model});
  checkpointer.set_stop_check([] { return true; });
  int64_t told = -1;
  checkpointer.set_before_stop([&](int64_t steps_done) { told = steps_done; });
  REQUIRE(checkpointer.restore() == 0);
  try {
    checkpointer.save_if_due(0);
    FAIL("no exception");
  } catch (const ddp::Error& error) {
    REQUIRE(error.exit_code() == ddp::ExitCode::UserException);
    REQUIRE_THAT(error.what(), Catch::Contains("fix: set checkpoint.dir"));
  }
  REQUIRE(told == 1);
}

TEST_CASE("saves are due by steps, and the ranks exchange messages rarely") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.every_steps = 40;
  options.keep_last = 2;
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  auto model = small_model();
  {
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
    for (auto step = checkpointer.restore(); step < 200; ++step) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      checkpointer.save_if_due(step);
    }
  }
  REQUIRE(names_in(options.dir) == std::vector<std::string>{"step_0000000200", "step_0000000160"});
  REQUIRE(job.num_gathers < 40);
}

TEST_CASE("an exception in training leaves no committed checkpoint that is unfinished") {
  TemporaryFolder folder;
  const auto options = options_in(folder);
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  Box model("model", {.tensors = {{"w", torch::zeros(1 << 20)}}, .values = {}});
  try {
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
    checkpointer.save(0);
    throw std::runtime_error("user's");
  } catch (const std::runtime_error&) {
  }
  REQUIRE(names_in(options.dir).empty());
  {
    ddp::Checkpointer again(plane, at::kCPU, options, {model});
    REQUIRE(again.restore() == 0);
  }
  REQUIRE(std::distance(std::filesystem::directory_iterator(options.dir), {}) == 0);
}

namespace {

// A disk on which no folder can be created.
struct NoFolders : ddp::FileOps {
  int mkdir(const char* path, mode_t mode) override {
    if (std::string(path).find(".saving") == std::string::npos) {
      return FileOps::mkdir(path, mode);
    }
    ++refused;
    errno = EDQUOT;
    return -1;
  }
  std::atomic<int> refused = 0;
};

// An object whose state cannot be copied if `broken` is set.
struct Fragile : Box {
  using Box::Box;
  StateDict state_dict() const override {
    if (broken) {
      throw std::runtime_error("out of pinned memory");
    }
    return Box::state_dict();
  }
  bool broken = false;
};

}  // namespace

TEST_CASE("a failed save by time is retried when the next one is due, not at once") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.every_minutes = 0.12 / 60;
  options.stop_check_seconds = 0.01;
  options.max_failures = 4;
  NoFolders disk;
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  auto model = small_model();
  CheckpointerImpl checkpointer(plane, at::kCPU, options, {model}, disk);
  const auto start = std::chrono::steady_clock::now();
  // The fourth failure would throw, but cannot happen before 4 * 0.12 s.
  for (int64_t step = 0; std::chrono::steady_clock::now() - start < std::chrono::milliseconds(300);
       ++step) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    checkpointer.save_if_due(step);
  }
  REQUIRE(disk.refused >= 1);
}

TEST_CASE("before_stop runs also if the stop's save is the last failure that is allowed") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.max_failures = 1;
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  Fragile model("model", {.tensors = {{"w", torch::zeros(3)}}, .values = {}});
  ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
  checkpointer.set_stop_check([] { return true; });
  int64_t told = -1;
  checkpointer.set_before_stop([&](int64_t steps_done) { told = steps_done; });
  checkpointer.restore();
  model.broken = true;
  REQUIRE_THROWS_WITH(checkpointer.save_if_due(0),
                      Catch::Contains("rank 0 was asked to stop: stopped after 1 steps, but the "
                                      "state is lost: ") &&
                          Catch::Contains("out of pinned memory"));
  REQUIRE(told == 1);
}

TEST_CASE("a state that one rank cannot copy fails the save on all, and training continues") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.max_failures = 2;
  const int victim = GENERATE(0, 1);
  const auto errors = run_ranks(2, [&](ddp::ControlPlane& plane) {
    Fragile model("model", {.tensors = {{"w", torch::zeros(3)}}, .values = {}});
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
    model.broken = plane.rank() == victim;
    checkpointer.save(0);
    REQUIRE(rank_blamed(checkpointer) == victim);
    REQUIRE(checkpointer.last_saved_step() == -1);
    model.broken = false;
    checkpointer.save(1);
    checkpointer.wait();
    REQUIRE(checkpointer.last_saved_step() == 2);
    model.broken = plane.rank() == victim;
    checkpointer.save(2);
    REQUIRE(rank_blamed(checkpointer) == victim);
    checkpointer.save(3);
    checkpointer.wait();
  });
  for (const auto& error : errors) {
    REQUIRE_THAT(message_of<ddp::WriteError>(error), Catch::Contains("out of pinned memory") &&
                                                         Catch::Contains("failure 2 of at most 2"));
  }
  REQUIRE(names_in(options.dir) == std::vector<std::string>{"step_0000000002"});
  REQUIRE(std::distance(std::filesystem::directory_iterator(options.dir), {}) == 1);
}

TEST_CASE("a step is saved once, and again only for a metric that keep_best uses") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.every_steps = 1;
  options.keep_best = GENERATE(ddp::KeepBest::Off, ddp::KeepBest::Max);
  options.async = GENERATE(false, true);
  const bool looks = options.keep_best == ddp::KeepBest::Max;
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  auto model = small_model();
  const std::vector<std::string> once{"step_0000000001"};
  const std::vector<std::string> again{"step_0000000001.1", "step_0000000001"};
  {
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
    const bool metric_first = GENERATE(false, true);
    if (metric_first) {
      checkpointer.save(0, 0.5);
    }
    checkpointer.save_if_due(0);
    checkpointer.wait();
    REQUIRE(names_in(options.dir) == once);
    checkpointer.save(0, 0.5);
    checkpointer.wait();
    REQUIRE(names_in(options.dir) == (looks && !metric_first ? again : once));
  }
  const auto before = names_in(options.dir);
  // The next start of a finished run.
  ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
  REQUIRE(checkpointer.restore() == 1);
  checkpointer.save(0);
  checkpointer.wait();
  if (looks) {
    checkpointer.save(0, 0.5);
    checkpointer.wait();
  }
  REQUIRE(names_in(options.dir) == before);
}

TEST_CASE("the best checkpoint is kept beyond keep_last") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.keep_best = ddp::KeepBest::Max;
  options.keep_last = 1;
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  auto model = small_model();
  {
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
    const double accuracies[] = {0.2, 0.6, 0.4, 0.5};
    for (int64_t step = 0; step < 4; ++step) {
      checkpointer.save(step, accuracies[step]);
    }
  }
  REQUIRE(names_in(options.dir) == std::vector<std::string>{"step_0000000004", "step_0000000002"});
}

TEST_CASE("a stop whose save fails names the file and the fix") {
  TemporaryFolder folder;
  const auto options = options_in(folder);
  FullDisk disk;
  disk.full = true;
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  auto model = small_model();
  CheckpointerImpl checkpointer(plane, at::kCPU, options, {model}, disk);
  checkpointer.set_stop_check([] { return true; });
  std::exception_ptr error;
  try {
    checkpointer.save_if_due(4);
  } catch (...) {
    error = std::current_exception();
  }
  REQUIRE_THAT(message_of<ddp::WriteError>(error),
               Catch::Contains("stopped after 5 steps") && Catch::Contains(options.dir) &&
                   Catch::Contains("No space left") && Catch::Contains("fix: free space"));
}

TEST_CASE("a folder that cannot be made, or is a file, is refused before training") {
  TemporaryFolder folder;
  testing::write_file(folder.file("notes"), "mine");
  const auto restore = [&](const std::string& dir) {
    ddp::CheckpointOptions options;
    options.dir = dir;
    return run_ranks(2, [&](ddp::ControlPlane& plane) {
      auto model = small_model();
      ddp::Checkpointer(plane, at::kCPU, options, {model}).restore();
    });
  };
  for (const auto& error : restore("/proc/nope/ckpt")) {
    REQUIRE_THAT(message_of<ddp::WriteError>(error),
                 Catch::Contains("checkpoint.dir=/proc/nope/ckpt: cannot make the folder "
                                 "/proc/nope: No such file") &&
                     Catch::Contains("set another checkpoint.dir"));
  }
  for (const auto& dir : {folder.file("notes"), folder.file("notes") + "/ckpt"}) {
    for (const auto& error : restore(dir)) {
      REQUIRE_THAT(message_of<ddp::SettingsError>(error),
                   Catch::Contains("checkpoint.dir=" + dir +
                                   " cannot be a folder: " + folder.file("notes") + " is a file") &&
                       Catch::Contains("fix: set the path of a folder"));
    }
  }
}

namespace {

// A disk on which no file can be created; folders exist.
struct NoFiles : ddp::FileOps {
  int open(const char* path, int flags, mode_t mode) override {
    if (error != 0 && (flags & O_CREAT) != 0) {
      errno = error;
      return -1;
    }
    return FileOps::open(path, flags, mode);
  }
  int error = 0;
};

}  // namespace

TEST_CASE("a folder in which a rank cannot write is refused before training, with the cause") {
  TemporaryFolder folder;
  const auto options = options_in(folder);
  std::filesystem::create_directory(options.dir);
  const int victim = GENERATE(0, 1);
  const auto [error, reason, fix] = GENERATE(table<int, std::string, std::string>({
      {EROFS, "Read-only file system", "fix: mount that file system for writing"},
      {EACCES, "Permission denied", "fix: let this user write there"},
      {EMFILE, "Too many open files", "fix: raise the process's limit of open files (ulimit -n)"},
      {ENOENT, "No such file", "fix: create its folder"},
      {ENOSPC, "No space left", "fix: free space there"},
      {EDQUOT, "quota exceeded", "fix: free space of this user's quota"},
  }));
  NoFiles disks[2];
  disks[victim].error = error;
  const auto errors = run_ranks(2, [&](ddp::ControlPlane& plane) {
    auto model = small_model();
    CheckpointerImpl checkpointer(plane, at::kCPU, options, {model}, disks[plane.rank()]);
    checkpointer.restore();
  });
  for (const auto& thrown : errors) {
    REQUIRE_THAT(message_of<ddp::WriteError>(thrown),
                 Catch::Contains("checkpoint.dir=" + options.dir) && Catch::Contains(reason) &&
                     Catch::Contains(fix) && Catch::Contains(", or set another checkpoint.dir"));
  }
  REQUIRE(std::filesystem::is_empty(options.dir));
}

TEST_CASE("a run that lost its folder to another saves nothing more there and ends with 73") {
  TemporaryFolder folder;
  const auto options = options_in(folder);
  const ddp::detail::OwnerRecord successor{
      .host = "node9", .job = "80", .process = 5, .machine = "other", .start = "a"};
  const auto errors = run_ranks(2, [&](ddp::ControlPlane& plane) {
    auto model = small_model();
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
    checkpointer.restore();
    checkpointer.save(0);
    checkpointer.wait();
    plane.barrier();
    if (plane.rank() == 0) {
      testing::write_file(options.dir + "/.owner", successor.to_text());
    }
    plane.barrier();
    checkpointer.save(1);
  });
  for (const auto& error : errors) {
    REQUIRE_THAT(message_of<ddp::WriteError>(error),
                 Catch::Contains("was taken over by host \"node9\", job \"80\", process 5"));
  }
  REQUIRE(names_in(options.dir) == std::vector<std::string>{"step_0000000001"});
}
