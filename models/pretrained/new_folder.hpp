// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace models::detail {

/// A folder that appears whole or not at all: filled under another name beside its place, then
/// renamed.
class NewFolder {
 public:
  /// Throws ddp::SettingsError where `path` is there and is not an empty folder (`replaces`: not a
  /// folder), ddp::WriteError where nothing can be made beside it. Folders above it are made, links
  /// to a folder followed.
  explicit NewFolder(std::string path, bool replaces = false);
  /// Removes what was written, unless committed.
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  /// Where to write: the folder's name until commit().
  const std::string& temporary() const { return temporary_; }
  void write(const std::string& name, std::string_view text);
  /// Where `replaces` as replace_folder() does.
  void commit();

 private:
  std::string path_;
  std::string temporary_;
  bool replaces_;
  bool committed_ = false;
};

/// Whether `path` is an existing folder with something in it.
bool holds_files(const std::string& path);

std::string without_slash(std::string path);
/// "." for a name alone.
std::string parent_of(const std::string& path);

}  // namespace models::detail
