// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace models::detail {

/// A folder that appears whole or not at all: filled under another name beside its place, then
/// renamed.
class NewFolder {
 public:
  /// Throws ddp::SettingsError where `path` is there and is not an empty folder, ddp::WriteError
  /// where nothing can be made beside it. Folders above it are made.
  explicit NewFolder(std::string path);
  /// Removes what was written, unless committed.
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  /// Where to write: the folder's name until commit().
  const std::string& temporary() const { return temporary_; }
  void write(const std::string& name, std::string_view text);
  void commit();

 private:
  std::string path_;
  std::string temporary_;
  bool committed_ = false;
};

/// Whether `path` is an existing folder with something in it.
bool holds_files(const std::string& path);

}  // namespace models::detail
