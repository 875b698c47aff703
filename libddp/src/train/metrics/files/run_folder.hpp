// SPDX-License-Identifier: Apache-2.0
// The files of one run, written by one process at a time. Torch-free. A full disk causes a warning
// and never stops training.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "train/checkpoint/folder_owner.hpp"

namespace ddp::detail {

class RunFolder {
 public:
  /// No folder: all output is dropped.
  RunFolder() = default;
  /// Makes `dir`/`name` if needed and takes it like FolderOwner; `job` is the scheduler's id.
  /// Throws WriteError, FolderTakenError, and SettingsError for a name with a '/', a link, and the
  /// folder of another user, who could plant links in it.
  RunFolder(const std::string& dir, const std::string& name, const std::string& job = "",
            FileOps& ops = system_file_ops());

  const std::string& path() const { return path_; }
  /// Appends a line and flushes it; a new file starts with `header`.
  void append(const std::string& file, const std::string& line, const std::string& header = "");
  /// The same for bytes.
  void append_bytes(const std::string& file, const std::string& bytes);
  /// A whole file; empty if it cannot be read, or is no regular file.
  std::string read(const std::string& file) const;
  /// Replaces a whole file: readers see the old text or the new.
  void write(const std::string& file, const std::string& text,
             Durability durability = Durability::Cached);

 private:
  void warn_once(const std::string& file, const std::string& reason = "");
  bool is_ours();
  /// Nothing, after a warning, if it cannot be opened.
  AppendedFile* open(const std::string& file);

  FileOps* ops_ = &system_file_ops();  // of write()
  std::string path_;
  std::shared_ptr<FolderOwner> owner_;
  std::map<std::string, std::unique_ptr<AppendedFile>> open_;
  bool warned_ = false;
};

/// "2026-11-21_10-30-05", local time; with a number appended if `dir` has that name.
std::string time_name(const std::string& dir);

}  // namespace ddp::detail
