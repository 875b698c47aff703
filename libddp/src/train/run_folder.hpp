// SPDX-License-Identifier: Apache-2.0
// The files of one run, which one process at a time writes. Torch-free. A disk that fills up costs
// a warning, never the training.
#pragma once

#include <fstream>
#include <map>
#include <memory>
#include <string>

#include "train/folder_owner.hpp"

namespace ddp::detail {

class RunFolder {
 public:
  /// No folder: everything is dropped.
  RunFolder() = default;
  /// Makes `dir`/`name` where needed, and takes it as FolderOwner says; `job` is the scheduler's
  /// id. Throws WriteError, SettingsError for a name with a '/', FolderTakenError.
  RunFolder(const std::string& dir, const std::string& name, const std::string& job = "");

  const std::string& path() const { return path_; }
  /// Appends a line and hands it to the system at once; `header` comes first in a new file.
  void append(const std::string& file, const std::string& line, const std::string& header = "");
  /// Replaces a whole file.
  void write(const std::string& file, const std::string& text);

 private:
  void warn_once(const std::string& file, const std::string& reason = "");
  bool is_ours();

  std::string path_;
  std::shared_ptr<FolderOwner> owner_;
  std::map<std::string, std::ofstream> open_;
  bool warned_ = false;
};

/// "2026-11-21_10-30-05", local time; with a number behind it where `dir` holds that name.
std::string time_name(const std::string& dir);

}  // namespace ddp::detail
