// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint_dir.hpp"

#include <utility>

#include "train/save_failure.hpp"

namespace ddp::detail {
namespace {

// Adds another fix to the disk errors that `write` throws.
template <typename F>
auto naming_fix(F&& write) {
  try {
    return write();
  } catch (const FileError& error) {
    throw WriteError(error.what() + std::string(kOtherFolder));
  }
}

}  // namespace

CheckpointDir::CheckpointDir(FileOps& ops, const CheckpointOptions& options, std::string job)
    : ops_(ops),
      path_(options.dir),
      job_(std::move(job)),
      kept_{.keep_last = options.keep_last,
            .keep_best = options.keep_best != "off",
            .best_is_max = options.keep_best == "max"} {}

void CheckpointDir::own() {
  const auto words = concat("checkpoint.dir=", path_);
  try {
    make_folders(ops_, path_);
    owner_ = FolderOwner::take(
        ops_, {.path = path_, .words = words, .fix = "name another checkpoint.dir", .job = job_});
  } catch (const FileError& error) {
    throw WriteError(concat(words, ": ", error.what(), kOtherFolder));
  }
}

std::vector<CheckpointFolder> CheckpointDir::open(bool leave_untouched) {
  auto folders = list_checkpoints(path_);
  if (!leave_untouched) {
    own();
    remove_stale_saves(ops_, path_);
    folders = list_checkpoints(path_);  // the previous owner may have saved until now
  }
  return folders;
}

// Nodes may mount the folder differently.
void CheckpointDir::require_writable(ControlPlane& control_plane) const {
  std::string reason;
  if (control_plane.rank() != 0) {
    try {
      try_writing(ops_, path_);
    } catch (const FileError& error) {
      reason = error.what();
    }
  }
  const auto reasons = control_plane.all_gather(reason);
  for (std::size_t rank = 0; rank < reasons.size(); ++rank) {
    if (!reasons[rank].empty()) {
      throw SaveFailure(static_cast<int>(rank), concat("checkpoint.dir=", path_, ": rank ", rank,
                                                       " ", reasons[rank], kOtherFolder));
    }
  }
}

std::string CheckpointDir::begin_save(int64_t done) {
  if (owner_ == nullptr) {
    own();
  }
  owner_->require_own();
  return naming_fix([&] { return ddp::detail::begin_save(ops_, path_, done); });
}

FileRecord CheckpointDir::write_file(const std::string& saving, const std::string& name,
                                     const std::vector<std::string_view>& chunks) const {
  return naming_fix([&] { return write_new_file(ops_, path_of(saving), name, chunks); });
}

void CheckpointDir::discard_save(const std::string& saving) const {
  remove_folder(ops_, path_of(saving));
}

std::string CheckpointDir::commit(const std::string& saving, const Manifest& manifest,
                                  const Retention& retention) const {
  owner_->require_own();
  const auto made = naming_fix([&] { return commit_save(ops_, path_, saving, manifest); });
  prune_checkpoints(ops_, path_, made, retention);
  return made.name;
}

Retention CheckpointDir::retention() const {
  auto retention = kept_;
  retention.damaged = damaged_;
  return retention;
}

}  // namespace ddp::detail
