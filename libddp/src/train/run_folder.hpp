// SPDX-License-Identifier: Apache-2.0
// The files of one run. Torch-free. A disk that fills up costs a warning, never the training.
#pragma once

#include <fstream>
#include <map>
#include <string>

namespace ddp::detail {

class RunFolder {
 public:
  /// No folder: everything is dropped.
  RunFolder() = default;
  /// Makes `dir`/`name` where needed. Throws WriteError, SettingsError for a name with a '/'.
  RunFolder(const std::string& dir, const std::string& name);

  const std::string& path() const { return path_; }
  /// Appends a line and hands it to the system at once; `header` comes first in a new file.
  void append(const std::string& file, const std::string& line, const std::string& header = "");
  /// Replaces a whole file.
  void write(const std::string& file, const std::string& text);

 private:
  void warn_once(const std::string& file);

  std::string path_;
  std::map<std::string, std::ofstream> open_;
  bool warned_ = false;
};

/// "2026-11-21_10-30-05", local time.
std::string time_name();

}  // namespace ddp::detail
