// SPDX-License-Identifier: Apache-2.0
// The folder checkpoint.dir as one run uses it: its ownership, the saves in it, and the checkpoints
// known to be damaged. Rank 0 owns the folder; other ranks write their files. Torch-free.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/core/control_plane.hpp"
#include "ddp/train/options.hpp"
#include "train/checkpoint_files.hpp"
#include "train/folder_owner.hpp"

namespace ddp::detail {

/// `saving` is the folder of a save in progress, within this folder. Disk errors throw WriteError
/// with the fix to name another folder.
class CheckpointDir {
 public:
  /// `job` is the scheduler's id, named in the owner record.
  CheckpointDir(FileOps& ops, const CheckpointOptions& options, std::string job);

  std::string path_of(const std::string& name) const { return path_ + "/" + name; }
  std::string path_of(const CheckpointFolder& folder) const { return path_of(folder.name); }

  /// On rank 0: returns the committed checkpoints, newest first. Unless `leave_untouched`, makes
  /// and takes the folder, and removes the remains of crashed saves. A folder that cannot be made
  /// is thus reported before training, not at the first save.
  std::vector<CheckpointFolder> open(bool leave_untouched);
  /// Throws SaveFailure naming a rank that cannot write here. Rank 0 writes its owner record
  /// instead of a test file. Collective.
  void require_writable(ControlPlane& control_plane) const;

  /// On rank 0: makes the folder of a save. Takes this folder if open() did not. Throws
  /// FolderTakenError if another process owns this folder.
  std::string begin_save(int64_t done);
  /// Writes a file of a save. Any thread.
  FileRecord write_file(const std::string& saving, const std::string& name,
                        const std::vector<std::string_view>& chunks) const;
  /// On rank 0: removes a save that failed on another rank.
  void discard_save(const std::string& saving) const;
  /// On rank 0: commits the save and removes checkpoints according to `retention`. Returns the
  /// checkpoint's name. Runs on the writing thread, after begin_save() on the training thread.
  std::string commit(const std::string& saving, const Manifest& manifest,
                     const Retention& retention) const;

  /// What commit() keeps.
  Retention retention() const;
  void note_damaged(const std::string& name) { damaged_.insert(name); }
  /// A new checkpoint may reuse the name of a damaged one.
  void note_committed(const std::string& name) { damaged_.erase(name); }

 private:
  void own();

  FileOps& ops_;
  const std::string path_;
  const std::string job_;
  const Retention kept_;           ///< without damaged ones
  std::set<std::string> damaged_;  ///< names of checkpoints that a restore skipped
  std::shared_ptr<FolderOwner> owner_;
};

}  // namespace ddp::detail
