// SPDX-License-Identifier: Apache-2.0
// The callback after a checkpoint is complete: when, where and how often.
#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "ddp/train/checkpoint.hpp"
#include "support/catch.hpp"
#include "unit/train/checkpoint/checkpoint_objects.hpp"
#include "unit/train/thread_control_plane.hpp"

using testing::options_in;
using testing::run_ranks;
using testing::small_model;
using testing::TemporaryFolder;
using testing::ThreadControlPlane;
using testing::ThreadJob;

namespace {

using Saved = std::vector<std::pair<int64_t, std::string>>;

}  // namespace

TEST_CASE("after a save rank 0 gets the folder of the complete checkpoint, once, in its thread") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.async = GENERATE(false, true);
  options.every_steps = 4;
  options.stop_check_seconds = 0.001;
  Saved told[2];
  const auto errors = run_ranks(2, [&](ddp::ControlPlane& plane) {
    auto model = small_model();
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
    const auto thread = std::this_thread::get_id();
    checkpointer.set_after_save([&](int64_t steps_done, const std::string& path) {
      REQUIRE(std::this_thread::get_id() == thread);
      REQUIRE(std::filesystem::exists(path + "/manifest.json"));
      REQUIRE(checkpointer.last_saved_step() == steps_done);
      told[plane.rank()].emplace_back(steps_done, path);
    });
    for (int64_t step = 0; step < 6; ++step) {
      checkpointer.save_if_due(step);
    }
    checkpointer.save(3);  // saved already
    checkpointer.save(5);
    checkpointer.wait();
    checkpointer.wait();
  });
  REQUIRE_FALSE(errors[0]);
  REQUIRE_FALSE(errors[1]);
  const auto path = options.dir + "/step_000000000";
  REQUIRE(told[0] == Saved{{4, path + "4"}, {6, path + "6"}});
  REQUIRE(told[1].empty());
}

TEST_CASE("an exception after a save leaves the checkpoint, and later saves work") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.async = GENERATE(false, true);
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  auto model = small_model();
  ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
  checkpointer.set_after_save(
      [](int64_t, const std::string&) { throw std::runtime_error("the copy failed"); });
  const auto save = [&](int64_t step) {
    checkpointer.save(step);
    checkpointer.wait();
  };
  REQUIRE_THROWS_WITH(save(0), "the copy failed");
  REQUIRE(checkpointer.last_saved_step() == 1);
  REQUIRE_NOTHROW(save(0));  // nothing new
  REQUIRE_THROWS_WITH(save(1), "the copy failed");
  REQUIRE(ddp::detail::list_checkpoints(options.dir).front().step == 2);
}

TEST_CASE("the destructor finishes a save without the callback, whose objects may be gone") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.async = true;
  ThreadJob job(1);
  ThreadControlPlane plane(job, 0);
  auto model = small_model();
  int calls = 0;
  {
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
    checkpointer.set_after_save([&](int64_t, const std::string&) { ++calls; });
    checkpointer.save(0);
  }
  REQUIRE(calls == 0);
  REQUIRE(ddp::detail::list_checkpoints(options.dir).front().step == 1);
}

TEST_CASE("at a stop the callback waits for the last save, and its exception for before_stop") {
  TemporaryFolder folder;
  auto options = options_in(folder);
  options.async = GENERATE(false, true);
  options.stop_check_seconds = 0.001;
  Saved told;
  int64_t stopped[2] = {-1, -1};
  const auto errors = run_ranks(2, [&](ddp::ControlPlane& plane) {
    auto model = small_model();
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
    checkpointer.set_stop_check([] { return true; });
    checkpointer.set_before_stop([&](int64_t done) { stopped[plane.rank()] = done; });
    checkpointer.save(0);
    checkpointer.wait();
    checkpointer.set_after_save([&](int64_t steps_done, const std::string& path) {
      told.emplace_back(steps_done, path);
      throw std::runtime_error("the copy failed");
    });
    if (options.async) {
      checkpointer.save(1);  // in progress at the stop
    }
    for (int64_t step = 2; step < 1000; ++step) {
      checkpointer.save_if_due(step);
    }
  });
  const int64_t done = stopped[0];
  REQUIRE(done >= 3);
  REQUIRE(stopped[1] == done);
  REQUIRE(testing::message_of<std::runtime_error>(errors[0]) == "the copy failed");
  REQUIRE_THAT(testing::message_of<ddp::Stop>(errors[1]), Catch::Contains("was asked to stop"));
  const auto newest = ddp::detail::list_checkpoints(options.dir).front();
  REQUIRE(newest.step == done);
  REQUIRE(told == Saved{{done, options.dir + "/" + newest.name}});
}
