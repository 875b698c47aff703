// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace models::detail {

/// A folder that appears completely or not at all: it is filled under a temporary name in the same
/// parent folder, then renamed.
class NewFolder {
 public:
  /// Throws ddp::SettingsError if `path` exists and is not an empty folder (`replaces`: not a
  /// folder). Throws ddp::WriteError if the temporary folder cannot be created. Creates missing
  /// parent folders and follows a link to a folder.
  explicit NewFolder(std::string path, bool replaces = false);
  /// Removes the written files unless committed.
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  /// The folder's name until commit().
  const std::string& temporary() const { return temporary_; }
  void write(const std::string& name, std::string_view text);
  /// Renames the folder into place; with `replaces` as replace_folder() does.
  void commit();

 private:
  std::string path_;
  std::string temporary_;
  bool replaces_;
  bool committed_ = false;
};

/// True if `path` is an existing, non-empty folder.
bool holds_files(const std::string& path);

std::string without_slash(std::string path);
/// Returns "." for a bare name.
std::string parent_of(const std::string& path);

}  // namespace models::detail
