// SPDX-License-Identifier: Apache-2.0
// The folder of checkpoints as one run uses it.
#include <cerrno>
#include <filesystem>

#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "train/checkpoint/checkpoint_files.hpp"
#include "train/checkpoint/save_history.hpp"
#include "unit/train/temporary_folder.hpp"
#include "unit/train/thread_control_plane.hpp"

namespace {

using ddp::FileOps;
using ddp::detail::CheckpointDir;
using ddp::detail::Manifest;
using testing::message_of;
using testing::TemporaryFolder;

ddp::CheckpointOptions in(const TemporaryFolder& folder) {
  ddp::CheckpointOptions options;
  options.dir = folder.file("ckpt");
  options.keep_last = 1;
  return options;
}

std::string save_one(CheckpointDir& dir, int64_t step) {
  const auto saving = dir.begin_save(step);
  Manifest manifest{.step = step};
  manifest.files = {dir.write_file(saving, "model.safetensors", {"weights"})};
  return dir.commit(saving, manifest, dir.retention());
}

// A disk that is full after a number of writes.
struct SmallDisk : FileOps {
  int writes_left = 1000;
  ssize_t write(int fd, const void* data, std::size_t size) override {
    if (writes_left-- > 0) {
      return FileOps::write(fd, data, size);
    }
    errno = ENOSPC;
    return -1;
  }
};

}  // namespace

TEST_CASE("a folder is owned from open() or the first save on, and open() cleans it") {
  TemporaryFolder folder;
  CheckpointDir dir(ddp::system_file_ops(), in(folder), "77");
  const bool opens = GENERATE(true, false);
  std::filesystem::create_directories(folder.file("ckpt/.saving_00000001_abcdef"));
  if (opens) {
    REQUIRE(dir.open(/*leave_untouched=*/true).empty());
    REQUIRE_FALSE(std::filesystem::exists(folder.file("ckpt/.owner")));
    REQUIRE(dir.open(/*leave_untouched=*/false).empty());
    REQUIRE_THAT(testing::read_file(folder.file("ckpt/.owner")), Catch::Contains("77"));
  }
  REQUIRE(std::filesystem::exists(folder.file("ckpt/.saving_00000001_abcdef")) == !opens);
  REQUIRE(save_one(dir, 3) == "step_0000000003");
  REQUIRE(std::filesystem::exists(folder.file("ckpt/.owner")));
  REQUIRE(dir.open(/*leave_untouched=*/false).front().step == 3);
}

TEST_CASE("known damage does not count as a kept checkpoint until its name is reused") {
  TemporaryFolder folder;
  CheckpointDir dir(ddp::system_file_ops(), in(folder), "");
  const auto first = save_one(dir, 1);
  dir.record_damaged(first);
  REQUIRE(dir.retention().damaged == std::set<std::string>{first});
  REQUIRE(dir.retention().keep_last == 1);
  dir.record_committed(first);
  REQUIRE(dir.retention().damaged.empty());
  save_one(dir, 2);
  REQUIRE(dir.open(true).size() == 1);  // keep_last evicted step 1
}

TEST_CASE("a save on a full disk throws an error with the fix, and discarding it leaves no file") {
  TemporaryFolder folder;
  SmallDisk disk;
  CheckpointDir dir(disk, in(folder), "");
  const auto saving = dir.begin_save(1);
  disk.writes_left = 0;
  REQUIRE_THAT(
      message_of<ddp::WriteError>([&] { dir.write_file(saving, "model.safetensors", {"x"}); }),
      Catch::Contains("No space left") &&
          Catch::Contains("fix: free space there, or set another checkpoint.dir"));
  REQUIRE(std::filesystem::exists(dir.path_of(saving)));
  dir.discard_save(saving);
  REQUIRE_FALSE(std::filesystem::exists(dir.path_of(saving)));
}

TEST_CASE("the rank that cannot write the folder is named on all ranks") {
  TemporaryFolder folder;
  std::filesystem::create_directories(folder.file("ckpt"));
  SmallDisk disks[3];
  disks[1].writes_left = 0;
  const auto errors = testing::run_ranks(3, [&](ddp::ControlPlane& plane) {
    CheckpointDir(disks[plane.rank()], in(folder), "").require_writable(plane);
  });
  for (const auto& error : errors) {
    REQUIRE(error != nullptr);
    REQUIRE_THAT(message_of<ddp::detail::SaveFailure>([&] { std::rethrow_exception(error); }),
                 Catch::Contains("checkpoint.dir=" + folder.file("ckpt") + ": rank 1 ") &&
                     Catch::Contains("No space left"));
  }
}

TEST_CASE("a folder that another process took is neither saved to nor committed to") {
  TemporaryFolder folder;
  CheckpointDir dir(ddp::system_file_ops(), in(folder), "");
  const auto saving = dir.begin_save(1);
  const ddp::detail::OwnerRecord successor{
      .host = "node9", .job = "80", .process = 5, .machine = "other", .start = "a"};
  testing::write_file(folder.file("ckpt/.owner"), successor.to_text());
  using ddp::detail::FolderTakenError;
  REQUIRE_THAT(message_of<FolderTakenError>([&] { dir.begin_save(2); }),
               Catch::Contains("was taken over by host \"node9\""));
  REQUIRE_THAT(message_of<FolderTakenError>([&] { dir.commit(saving, {}, dir.retention()); }),
               Catch::Contains("was taken over by host \"node9\""));
  REQUIRE(dir.open(true).empty());
}
