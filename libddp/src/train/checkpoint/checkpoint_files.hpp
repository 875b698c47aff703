// SPDX-License-Identifier: Apache-2.0
// Checkpoints as folders on a disk that may fail or lose power at any moment. Torch-free.
//
//   DIR/step_0000000120/          a committed checkpoint; its name appears by one rename
//       manifest.json               lists every other file with size and checksum
//       model.safetensors …         rank_00000.safetensors …
//   DIR/.saving_0000000120_<hex>/ a save in progress, or the remains of a crashed one
//
// Order of a save: every file written and fsynced, manifest written and fsynced, fsync of the
// folder, rename of the folder, fsync of DIR. Before the rename only the old checkpoints exist;
// after it the new one is complete. Committed checkpoints never change; they are only removed as a
// whole.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/files/file_ops.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/train/options.hpp"
#include "train/checkpoint/folder_owner.hpp"
#include "train/checkpoint/manifest.hpp"

namespace ddp::detail {

struct CheckpointFolder {
  int64_t step = 0;
  int64_t repeat = 0;     ///< n-th save of the same step: step_0000000120.1
  std::string name = "";  ///< within DIR
  bool operator==(const CheckpointFolder&) const = default;
  friend auto message_fields(CheckpointFolder& folder) {
    return std::tie(folder.step, folder.repeat, folder.name);
  }
};

/// Makes DIR and its parents if they do not exist, and fsyncs the new names. Throws FileError.
void make_folders(FileOps& ops, const std::string& dir);

/// Writes a small file into DIR and removes it. Throws FileError.
void try_writing(FileOps& ops, const std::string& dir);

/// Makes DIR if needed and a folder for this save; returns its name within DIR. Throws FileError.
std::string begin_save(FileOps& ops, const std::string& dir, int64_t step);

/// Writes the manifest, renames the folder to its final name and returns the checkpoint. Throws
/// FileError. If an error occurs before the rename, the save folder is removed. If flushing the
/// parent folder fails after it, the complete checkpoint stays, and the save counts as failed.
CheckpointFolder commit_save(FileOps& ops, const std::string& dir, const std::string& saving,
                             const Manifest& manifest);

/// Committed checkpoints, newest first; empty if DIR does not exist. Throws SettingsError if DIR is
/// a file, ReadError if it cannot be read.
std::vector<CheckpointFolder> list_checkpoints(const std::string& dir);

/// The checkpoint's manifest. Throws ReadError, NewerFormatError.
Manifest load_manifest(const std::string& dir, const CheckpointFolder& checkpoint);

/// The damage of a file ("…/model.safetensors has 12 bytes, its manifest says 400"), or nothing.
std::optional<std::string> find_damage(const std::string& folder, const FileRecord& file);

/// The manifest of a checkpoint whose files all match it. Checks files for which `wanted` is true;
/// an empty function checks all. Throws ReadError naming the first damaged file, NewerFormatError.
Manifest check_checkpoint(const std::string& dir, const CheckpointFolder& checkpoint,
                          const std::function<bool(const std::string& file)>& wanted = {});

struct Retention {
  int64_t keep_last = 3;
  bool keep_best = false;
  bool best_is_max = false;
  std::set<std::string> damaged = {};  ///< names of checkpoints known to be damaged
};
/// Removes checkpoints older than `newest`, the checkpoint just committed, according to
/// `retention`. Damaged ones (known damage, no valid manifest, or a file of another size) do not
/// count towards keep_last. A non-finite one never evicts a finite one, and is the best only if no
/// finite one has a metric. Younger ones (damaged ones that a resume skipped) are kept. Best
/// effort; returns the names of removed checkpoints.
std::vector<std::string> prune_checkpoints(FileOps& ops, const std::string& dir,
                                           const CheckpointFolder& newest,
                                           const Retention& retention);

/// Those of `folders` (newest first) with a metric, in the order in which keep_best prefers them:
/// finite ones, then the better metric, then the newer.
std::vector<CheckpointFolder> best_first(const CheckpointOptions& options,
                                         const std::vector<CheckpointFolder>& folders);

/// Removes the remains of crashed saves, takeovers of DIR and try_writing. Best effort.
void remove_stale_saves(FileOps& ops, const std::string& dir) noexcept;

/// DIR as one run uses it: its owner, the saves in it, and the checkpoints known to be damaged.
/// Rank 0 owns the folder; other ranks write their files. `saving` is the name of a save's folder
/// within DIR. Disk errors throw WriteError with the fix to name another folder.
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
  void record_damaged(const std::string& name) { damaged_.insert(name); }
  /// A new checkpoint may reuse the name of a damaged one.
  void record_committed(const std::string& name) { damaged_.erase(name); }

 private:
  void take_ownership();

  FileOps& ops_;
  const std::string path_;
  const std::string job_;
  const Retention kept_;           ///< without damaged ones
  std::set<std::string> damaged_;  ///< names of checkpoints that a restore skipped
  std::shared_ptr<FolderOwner> owner_;
};

}  // namespace ddp::detail
