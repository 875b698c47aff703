// SPDX-License-Identifier: Apache-2.0
// Which checkpoint a restorer loads, and what it leaves to the other parts.
#include <torch/torch.h>

#include "support/catch.hpp"
#include "support/stderr_of.hpp"
#include "train/checkpoint/checkpoint_restorer.hpp"
#include "unit/train/checkpoint/checkpoint_objects.hpp"
#include "unit/train/thread_control_plane.hpp"

namespace {

using ddp::detail::CheckpointDir;
using ddp::detail::CheckpointTexts;
using testing::Box;
using testing::num_found;
using testing::stderr_of;
using testing::TemporaryFolder;

// A restore on one rank, with a model of one weight.
struct RestoredRank {
  RestoredRank(const ddp::CheckpointOptions& options, const ddp::LaunchEnvironment& launch = {})
      : dir(ddp::system_file_ops(), options, ""),
        texts(options, {}, /*is_main=*/true),
        objects{model},
        parts{plane, at::kCPU, options, launch, dir, texts, objects} {}
  std::optional<ddp::detail::SavedStep> restore() { return ddp::detail::restore_checkpoint(parts); }
  float weight() const { return model.state.tensors.at("w").item<float>(); }

  testing::ThreadJob job{1};
  testing::ThreadControlPlane plane{job, 0};
  CheckpointDir dir;
  CheckpointTexts texts;
  Box model{"model", {.tensors = {{"w", torch::zeros({})}}, .values = {}}};
  std::vector<ddp::StatefulRef> objects;
  ddp::detail::RestoreParts parts;
};

// Checkpoints after steps 1 (with a metric), 2 and 3, whose weight is the step.
void save_three(ddp::CheckpointOptions options, const std::string& settings = "mine: 1\n") {
  options.settings_text = settings;
  testing::ThreadJob job(1);
  testing::ThreadControlPlane plane(job, 0);
  Box model("model", {.tensors = {{"w", torch::zeros({})}}, .values = {}});
  ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
  for (int64_t done = 1; done <= 3; ++done) {
    model.state.tensors.at("w").fill_(static_cast<double>(done));
    checkpointer.save(done - 1, done == 1 ? std::optional(0.5) : std::nullopt);
  }
}

}  // namespace

TEST_CASE("a restore loads the newest complete checkpoint, its texts and whether it has a metric") {
  TemporaryFolder folder;
  const auto options = testing::options_in(folder);
  save_three(options);
  RestoredRank newest(options);
  auto restored = newest.restore();
  REQUIRE(restored.value().done == 3);
  REQUIRE_FALSE(restored->has_metric);
  REQUIRE(newest.weight() == 3);
  REQUIRE(newest.texts.get("settings") == "mine: 1\n");
  REQUIRE(newest.dir.retention().damaged.empty());

  for (const std::string name : {"step_0000000003", "step_0000000002"}) {
    testing::write_file(options.dir + "/" + name + "/model.safetensors", "cut");
  }
  RestoredRank older(options);
  const auto log = stderr_of([&] { restored = older.restore(); });
  REQUIRE(restored.value().done == 1);
  REQUIRE(restored->has_metric);
  REQUIRE(older.weight() == 1);
  REQUIRE(older.dir.retention().damaged ==
          std::set<std::string>{"step_0000000003", "step_0000000002"});
  REQUIRE_THAT(log, Catch::Contains("skipped the checkpoint " + options.dir + "/step_0000000003"));
}

TEST_CASE("a restart without a checkpoint is reported, a first start is not") {
  TemporaryFolder folder;
  auto options = testing::options_in(folder);
  const bool has_dir = GENERATE(true, false);
  if (!has_dir) {
    options.dir = "";
  }
  ddp::LaunchEnvironment launch;
  launch.job_id = "77";
  const auto log_of_start = [&](int restart) {
    launch.restart_count = restart;
    RestoredRank rank(options, launch);
    return stderr_of([&] { REQUIRE_FALSE(rank.restore()); });
  };
  REQUIRE(log_of_start(0).empty());
  REQUIRE_THAT(log_of_start(2), Catch::Contains("restart 2 of job 77 begins at step 0: ") &&
                                    Catch::Contains(has_dir ? "checkpoint.dir=" + options.dir +
                                                                  " holds no checkpoint"
                                                            : "checkpoint.dir is empty"));
}

TEST_CASE("read_only and an absent required folder leave the disk untouched") {
  TemporaryFolder folder;
  auto options = testing::options_in(folder);
  const bool required = GENERATE(true, false);
  if (required) {
    options.resume = ddp::Resume::Require;
    REQUIRE_THROWS_AS(RestoredRank(options).restore(), ddp::ReadError);
  } else {
    options.read_only = true;
    REQUIRE_FALSE(RestoredRank(options).restore());
  }
  REQUIRE_FALSE(std::filesystem::exists(options.dir));
}

TEST_CASE("steps of other lengths are reported or refused, unless nothing trains") {
  TemporaryFolder folder;
  auto options = testing::options_in(folder);
  const bool is_in_manifest = GENERATE(true, false);
  options.samples_per_step = is_in_manifest ? 64 : 0;
  // By one rank. Earlier versions saved settings alone, which then say the same.
  save_three(options, is_in_manifest ? "train:\n  batch_size: 1\n"
                                     : "train:\n  batch_size: 32\n  grad_accum_steps: 2\n");
  const auto log_with = [&](int64_t samples_per_step) {
    options.samples_per_step = samples_per_step;
    RestoredRank rank(options);
    return stderr_of([&] { REQUIRE(rank.restore().value().done == 3); });
  };
  CHECK(num_found(log_with(64), "samples per step") == 0);
  CHECK(num_found(log_with(0), "samples per step") == 0);  // this program does not say
  CHECK_THAT(log_with(32),
             Catch::Contains("step_0000000003 was saved by a run with 64 samples per step on 1 "
                             "rank, but this run has 32 samples per step on 1 rank") &&
                 Catch::Contains("fix: set train.batch_size, loader.global_batch_size or"));
  options.same_steps = true;
  RestoredRank refused(options);
  CHECK_THROWS_WITH(refused.restore(), Catch::Contains("64 samples per step"));
  CHECK(refused.weight() == 0);  // before anything is loaded
  options.read_only = true;
  CHECK(num_found(log_with(32), "[warning]") == 0);
}

TEST_CASE("without samples per step another number of ranks is reported") {
  TemporaryFolder folder;
  const auto options = testing::options_in(folder);
  save_three(options);
  const auto errors = testing::run_ranks(2, [&](ddp::ControlPlane& plane) {
    Box model("model", {.tensors = {{"w", torch::zeros({})}}, .values = {}});
    auto reading = options;
    reading.same_steps = true;
    ddp::Checkpointer(plane, at::kCPU, reading, {model}).restore();
  });
  for (const auto& error : errors) {
    CHECK_THAT(testing::message_of<ddp::SettingsError>(error),
               Catch::Contains("saved by a run with 1 rank, but this run has 2 ranks"));
  }
}

TEST_CASE("resume=best loads the best metric, finite ones first, and saves nothing") {
  TemporaryFolder folder;
  auto options = testing::options_in(folder);
  options.keep_last = 9;
  options.keep_best = GENERATE(ddp::KeepBest::Min, ddp::KeepBest::Max);
  const bool is_max = options.keep_best == ddp::KeepBest::Max;
  testing::ThreadJob job(1);
  testing::ThreadControlPlane plane(job, 0);
  Box model("model", {.tensors = {{"w", torch::zeros({})}}, .values = {}});
  {
    ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
    const double best = is_max ? 2 : 1;
    const double metrics[] = {best, 3 - best, best, is_max ? 9.0 : 0.0};
    for (int64_t step = 0; step < 4; ++step) {
      model.state.tensors.at("w").fill_(step == 3 ? NAN : static_cast<double>(step));
      checkpointer.save(step, metrics[step]);
    }
    checkpointer.save(4);  // without a metric
  }
  options.resume = ddp::Resume::Best;
  ddp::Checkpointer checkpointer(plane, at::kCPU, options, {model});
  REQUIRE(checkpointer.restore() == 3);
  CHECK(model.state.tensors.at("w").item<float>() == 2);
  CHECK_NOTHROW(checkpointer.save(2, 1.0));  // the restored state
  CHECK_THROWS_WITH(checkpointer.save_if_due(3),
                    Catch::Contains("checkpoint.resume=best is for evaluation; fix: set "
                                    "train.max_steps=3 to evaluate"));
  CHECK_THROWS_AS(checkpointer.save(3), ddp::SettingsError);

  for (const char* file : {"model.safetensors", "manifest.json"}) {
    testing::write_file(options.dir + "/step_0000000003/" + file, "cut");
    const auto log = stderr_of(
        [&] { REQUIRE(ddp::Checkpointer(plane, at::kCPU, options, {model}).restore() == 1); });
    CHECK_THAT(log, Catch::Contains("step_0000000003"));
  }
  CHECK_FALSE(std::filesystem::exists(options.dir + "/.owner"));
}

TEST_CASE("resume=best refuses the direction that the saving run did not have") {
  TemporaryFolder folder;
  auto options = testing::options_in(folder);
  // Earlier versions saved the direction in the settings only.
  const bool is_in_manifest = GENERATE(true, false);
  options.settings_text = is_in_manifest ? "" : "checkpoint:\n  keep_best: min\n";
  options.keep_best = ddp::KeepBest::Min;
  testing::ThreadJob job(1);
  testing::ThreadControlPlane plane(job, 0);
  Box model("model", {.tensors = {{"w", torch::zeros({})}}, .values = {}});
  ddp::Checkpointer(plane, at::kCPU, options, {model}).save(0, 0.5);
  if (!is_in_manifest) {
    const auto path = options.dir + "/step_0000000001/manifest.json";
    auto manifest = ddp::detail::parse_manifest(testing::read_file(path), path);
    manifest.keep_best.clear();
    testing::write_file(path, manifest_to_json(manifest));
  }
  options.resume = ddp::Resume::Best;
  CHECK_THAT(stderr_of([&] {
               REQUIRE(ddp::Checkpointer(plane, at::kCPU, options, {model}).restore() == 1);
             }),
             Catch::Contains("of 1 steps, metric 0.5"));
  options.keep_best = ddp::KeepBest::Max;
  options.settings_text.clear();
  CHECK_THROWS_WITH(ddp::Checkpointer(plane, at::kCPU, options, {model}).restore(),
                    Catch::Contains("was saved with min; fix: set checkpoint.keep_best=min"));
}

TEST_CASE("resume=require and resume=best need checkpoint.dir") {
  ddp::CheckpointOptions options;
  options.keep_best = ddp::KeepBest::Min;
  options.resume = GENERATE(ddp::Resume::Require, ddp::Resume::Best);
  CHECK_THROWS_WITH(RestoredRank(options).restore(), Catch::Contains("checkpoint.dir is empty"));
}

TEST_CASE("resume=best without a best checkpoint is an error with the fix") {
  TemporaryFolder folder;
  auto options = testing::options_in(folder);
  options.resume = ddp::Resume::Best;
  CHECK_THROWS_WITH(RestoredRank(options).restore(), Catch::Contains("checkpoint.keep_best=min"));
  options.keep_best = ddp::KeepBest::Min;
  CHECK_THROWS_WITH(
      RestoredRank(options).restore(),
      Catch::Contains("no checkpoint in checkpoint.dir=" + options.dir + " has a metric"));
}

TEST_CASE("a restore that only reads gives no warnings about training") {
  TemporaryFolder folder;
  auto options = testing::options_in(folder);
  {
    testing::ThreadJob job(1);
    testing::ThreadControlPlane plane(job, 0);
    options.settings_text = "lr_schedule:\n  lr: 0.5\n";
    Box model("model", {.tensors = {{"w", torch::ones({})}}, .values = {}});
    Box optimizer("optimizer", {.tensors = {{"m", torch::ones({})}}, .values = {}});
    ddp::Checkpointer(plane, at::kCPU, options, {model, optimizer}).save(0);
  }
  options.settings_text = "lr_schedule:\n  lr: 0.1\n";
  options.read_only = GENERATE(true, false);
  const auto log = stderr_of([&] {
    const auto errors = testing::run_ranks(2, [&](ddp::ControlPlane& plane) {
      Box model("model", {.tensors = {{"w", torch::zeros({})}}, .values = {}});
      REQUIRE(ddp::Checkpointer(plane, at::kCPU, options, {model}).restore() == 1);
      REQUIRE(model.state.tensors.at("w").item<float>() == 1);
    });
    REQUIRE_FALSE(errors[0]);
    REQUIRE_FALSE(errors[1]);
  });
  const int expected = options.read_only ? 0 : 1;  // on one rank
  CHECK(num_found(log, "also has state of 'optimizer'") == expected);
  CHECK(num_found(log, "with other random numbers") == expected);
  CHECK(num_found(log, "but this run has 2 ranks") == expected);
  CHECK(num_found(log, "lr_schedule.lr=0.1 (saved with 0.5)") == expected);
}

TEST_CASE("the model that does not fit is named if the program has several") {
  TemporaryFolder folder;
  const auto options = testing::options_in(folder);
  testing::ThreadJob job(1);
  testing::ThreadControlPlane plane(job, 0);
  Box model("model", {.tensors = {{"w", torch::ones({})}}, .values = {}});
  Box wider("model", {.tensors = {{"w", torch::ones({2})}}, .values = {}});
  ddp::Checkpointer(plane, at::kCPU, options, {{"generator", model}, {"critic", model}}).save(0);
  CHECK_THROWS_WITH(
      ddp::Checkpointer(plane, at::kCPU, options, {{"generator", model}, {"critic", wider}})
          .restore(),
      Catch::Contains("does not fit: 'critic': other shape or dtype of w"));
}
