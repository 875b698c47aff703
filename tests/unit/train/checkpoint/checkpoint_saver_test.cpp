// SPDX-License-Identifier: Apache-2.0
// One rank's writer, and the two phases of a save as the gathered statuses advance them.
#include <torch/torch.h>

#include <filesystem>
#include <future>
#include <limits>

#include "support/catch.hpp"
#include "support/stderr_of.hpp"
#include "train/checkpoint/checkpoint_saver.hpp"
#include "unit/train/checkpoint/checkpoint_objects.hpp"
#include "unit/train/thread_control_plane.hpp"

namespace {

using ddp::detail::CheckpointDir;
using ddp::detail::CheckpointSaver;
using ddp::detail::CheckpointTexts;
using ddp::detail::CheckpointWriter;
using ddp::detail::RankStatus;
using ddp::detail::SaveFailure;
using ddp::detail::SaveHistory;
using ddp::detail::WriterStatus;
using testing::Box;
using testing::names_in;
using testing::stderr_of;
using testing::TemporaryFolder;

// A disk whose writes wait until it is released.
struct SlowDisk : ddp::FileOps {
  std::promise<void> released;
  std::shared_future<void> release = released.get_future().share();
  ssize_t write(int fd, const void* data, std::size_t size) override {
    release.wait();
    return FileOps::write(fd, data, size);
  }
};

// The parts around a writer or a saver on rank 0.
struct Parts {
  explicit Parts(const TemporaryFolder& folder, ddp::FileOps& ops = ddp::system_file_ops())
      : options(testing::options_in(folder)),
        dir(ops, options, ""),
        texts(options, {}, /*is_main=*/true),
        history(options, /*is_main=*/true),
        model("model", {.tensors = {{"w", torch::arange(4, at::kFloat)}}, .values = {{"k", true}}}),
        objects{model} {}
  CheckpointSaver saver(ddp::ControlPlane& plane) {
    return {plane,
            at::kCPU,
            options,
            {.dir = dir, .texts = texts, .history = history, .objects = objects}};
  }

  ddp::CheckpointOptions options;
  CheckpointDir dir;
  CheckpointTexts texts;
  SaveHistory history;
  Box model;
  std::vector<ddp::StatefulRef> objects;
};

RankStatus failed(const std::string& error) {
  return {.writer = {.state = WriterStatus::State::Failed, .error = error}};
}

RankStatus running() {
  return {.writer = {.state = WriterStatus::State::Running}};
}

}  // namespace

TEST_CASE("a writer reports its files when they are written, and commits them") {
  TemporaryFolder folder;
  ddp::FileOps& system = ddp::system_file_ops();
  Parts parts(folder, system);
  CheckpointWriter writer(parts.dir, parts.objects, 0, at::kCPU);
  const auto saving = parts.dir.begin_save(1);
  writer.write(saving, "");
  parts.model.state.tensors.at("w").zero_();  // the copy is complete: the file keeps the state
  writer.wait();
  const auto status = writer.status(/*with_files=*/true);
  REQUIRE(status.state == WriterStatus::State::Resting);
  REQUIRE(status.not_finite.empty());
  REQUIRE(status.records.size() == 2);
  REQUIRE(writer.status(/*with_files=*/false).records.empty());
  writer.commit(saving, {.step = 1, .files = status.records});
  writer.wait();
  REQUIRE(writer.committed() == "step_0000000001");
  const auto manifest = ddp::detail::check_checkpoint(parts.options.dir, {1, 0, "step_0000000001"});
  REQUIRE(std::get<bool>(manifest.values.at("model").at("k")));
  const auto saved =
      ddp::load_safetensors(parts.options.dir + "/step_0000000001/model.safetensors");
  REQUIRE(saved.tensors.at("w")[3].item<float>() == 3);
}

TEST_CASE("a writer reports that it runs, why it failed, and why a state is not finite") {
  TemporaryFolder folder;
  SlowDisk disk;
  Parts parts(folder, disk);
  auto& weight = parts.model.state.tensors.at("w");
  weight[1] = std::numeric_limits<float>::infinity();
  CheckpointWriter writer(parts.dir, parts.objects, 1, at::kCPU);  // not rank 0: owns no folder
  std::filesystem::create_directories(parts.options.dir + "/saving");
  writer.write("saving", "the loss was NaN");
  REQUIRE(writer.status(true).state == WriterStatus::State::Running);
  disk.released.set_value();
  writer.wait();
  REQUIRE(writer.status(true).not_finite == "the loss was NaN");
  writer.write("absent", "");
  writer.wait();
  const auto status = writer.status(true);
  REQUIRE(status.state == WriterStatus::State::Failed);
  REQUIRE_THAT(status.error,
               Catch::Contains("/absent/") && Catch::Contains(", or set another checkpoint.dir"));
  REQUIRE(status.records.empty());
}

TEST_CASE("rank 0's writer names the tensor that is not finite") {
  TemporaryFolder folder;
  Parts parts(folder);
  parts.model.state.tensors.at("w")[1] = std::numeric_limits<float>::infinity();
  CheckpointWriter writer(parts.dir, parts.objects, 0, at::kCPU);
  writer.write(parts.dir.begin_save(1), "");
  writer.wait();
  REQUIRE(writer.status(true).not_finite == "inf or NaN in w");
}

TEST_CASE("a save waits for all writers, then for rank 0's commit") {
  TemporaryFolder folder;
  Parts parts(folder);
  testing::ThreadJob job(1);
  testing::ThreadControlPlane plane(job, 0);
  auto saver = parts.saver(plane);
  REQUIRE_FALSE(saver.in_progress());
  saver.begin(5, 0.25, "");
  REQUIRE(saver.in_progress().value().done == 5);
  REQUIRE(saver.in_progress()->has_metric);
  saver.wait_for_writer();
  const RankStatus own{.writer = saver.status()};
  REQUIRE(own.writer.records.size() == 2);
  saver.advance({own, running()});  // rank 1 still writes
  REQUIRE(saver.status().records.size() == 2);
  saver.advance({own, {.writer = {.not_finite = "inf on rank 1"}}});
  REQUIRE(saver.status().records.empty());  // committing
  saver.advance({running(), {}});
  REQUIRE(saver.in_progress());
  saver.wait_for_writer();
  const auto log = stderr_of([&] { saver.advance({{.writer = saver.status()}, {}}); });
  REQUIRE_FALSE(saver.in_progress());
  REQUIRE(parts.history.newest().done == 5);
  REQUIRE(parts.history.newest().has_metric);
  REQUIRE_THAT(log, Catch::Contains("saved " + parts.options.dir + "/step_0000000005 in ") &&
                        Catch::Contains("counts as not finite (inf on rank 1)"));
  const auto manifest = ddp::detail::load_manifest(parts.options.dir, {5, 0, "step_0000000005"});
  REQUIRE(manifest.world_size == 2);
  REQUIRE(manifest.metric == 0.25);
  REQUIRE_FALSE(manifest.finite);
}

TEST_CASE("a failed writer drops the save once no writer runs, and its folder is removed") {
  TemporaryFolder folder;
  Parts parts(folder);
  testing::ThreadJob job(1);
  testing::ThreadControlPlane plane(job, 0);
  auto saver = parts.saver(plane);
  const auto log = stderr_of([&] {
    saver.begin(5, {}, "");
    saver.wait_for_writer();
    const RankStatus own{.writer = saver.status()};
    saver.advance({own, failed("quota exceeded"), running()});
    REQUIRE(saver.in_progress());
    saver.advance({own, failed("quota exceeded"), {}});
  });
  REQUIRE_FALSE(saver.in_progress());
  REQUIRE(parts.history.failure().value().rank == 1);
  REQUIRE_THAT(log, Catch::Contains("rank 1: quota exceeded"));
  REQUIRE(names_in(parts.options.dir).empty());
  for (const auto& entry : std::filesystem::directory_iterator(parts.options.dir)) {
    REQUIRE(entry.path().filename() == ".owner");
  }
}

TEST_CASE("a failed commit counts as rank 0's failure") {
  TemporaryFolder folder;
  Parts parts(folder);
  testing::ThreadJob job(1);
  testing::ThreadControlPlane plane(job, 0);
  auto saver = parts.saver(plane);
  stderr_of([&] {
    saver.begin(5, {}, "");
    saver.wait_for_writer();
    saver.advance({{.writer = saver.status()}});
    saver.wait_for_writer();
    saver.advance({failed("cannot rename")});
  });
  REQUIRE_FALSE(saver.in_progress());
  REQUIRE(parts.history.failure().value().rank == 0);
  REQUIRE(parts.history.newest().done == -1);
}
