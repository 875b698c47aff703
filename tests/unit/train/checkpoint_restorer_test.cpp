// SPDX-License-Identifier: Apache-2.0
// Which checkpoint a restorer loads, and what it leaves to the other parts.
#include <torch/torch.h>

#include "support/catch.hpp"
#include "support/stderr_of.hpp"
#include "train/checkpoint_restorer.hpp"
#include "unit/train/checkpoint_objects.hpp"
#include "unit/train/thread_control_plane.hpp"

namespace {

using ddp::detail::CheckpointDir;
using ddp::detail::CheckpointTexts;
using testing::Box;
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
void save_three(ddp::CheckpointOptions options) {
  options.settings_text = "mine: 1\n";
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
