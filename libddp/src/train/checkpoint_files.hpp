// SPDX-License-Identifier: Apache-2.0
// Checkpoints as folders on a disk that may fail or lose power at any moment. Torch-free.
//
//   DIR/step_00000120/            a committed checkpoint; its name appears by one rename
//       manifest.json             lists every other file with size and checksum
//       model.safetensors …       rank_00000.safetensors …
//   DIR/.saving_00000120_<hex>/   a save in progress, or the remains of a crashed one
//
// Order of a save: every file written and fsynced, manifest written and fsynced, fsync of the
// folder, rename of the folder, fsync of DIR. Before the rename only the old checkpoints exist;
// after it the new one is complete. Committed checkpoints never change; they are only removed as a
// whole.
#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/file_ops.hpp"
#include "train/manifest.hpp"

namespace ddp::detail {

struct CheckpointFolder {
  int64_t step = 0;
  int64_t repeat = 0;     ///< n-th save of the same step: step_00000120.1
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

/// Writes the manifest and commits; returns the checkpoint. If it throws FileError, the save folder
/// is removed.
CheckpointFolder commit_save(FileOps& ops, const std::string& dir, const std::string& saving,
                             const Manifest& manifest);

/// Committed checkpoints, newest first; empty if DIR does not exist. Throws SettingsError if DIR is
/// a file, ReadError if it cannot be read.
std::vector<CheckpointFolder> list_checkpoints(const std::string& dir);

/// The checkpoint's manifest. Throws ReadError, NewerFormatError.
Manifest load_manifest(const std::string& dir, const CheckpointFolder& checkpoint);

/// The damage of a file ("…/model.safetensors is truncated: 12 of 400 bytes"), or nothing.
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

/// Removes the remains of crashed saves, takeovers of DIR and try_writing. Best effort.
void remove_stale_saves(FileOps& ops, const std::string& dir) noexcept;

}  // namespace ddp::detail
