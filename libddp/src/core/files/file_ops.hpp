// SPDX-License-Identifier: Apache-2.0
// Opens files of folders into which other users may put links, named pipes and devices.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "ddp/detail/files.hpp"

namespace ddp::detail {

/// Whether to follow a symbolic link in the last part of a path.
enum class Links { Follow, Refuse };

/// Returns a descriptor for reading the regular file `path`. On failure returns -1 and sets `why`
/// and errno. Refuses other file types at once: a named pipe would wait for a writer.
int open_to_read(const std::string& path, std::string& why, Links links = Links::Follow);

/// Returns the first `limit` bytes of the regular file `path`, or the whole file if shorter. On
/// failure returns nothing and sets `why`.
std::optional<std::string> read_start(const std::string& path, std::size_t limit, std::string& why,
                                      Links links = Links::Follow);

/// At most 64 KiB of a file of the kernel, such as /proc/cpuinfo. Empty: this host has no such
/// file.
std::string kernel_text(const std::string& path);

/// A file that grows by whole pieces. Any thread, one at a time.
class AppendedFile {
 public:
  /// Opens the regular file `path`, or makes it. On failure returns nothing and sets `why`. Never
  /// follows a link and never waits.
  static std::unique_ptr<AppendedFile> open(const std::string& path, std::string& why);
  ~AppendedFile();
  AppendedFile(const AppendedFile&) = delete;
  AppendedFile& operator=(const AppendedFile&) = delete;

  bool is_empty() const;
  /// Appends all of `bytes` or nothing: a part that a full disk cut is removed. On failure returns
  /// false and sets `why`.
  bool append(std::string_view bytes, std::string& why);

 private:
  explicit AppendedFile(int fd) : fd_(fd) {}

  const int fd_;
};

/// Empty if this user owns the folder `path`, else a reason: "it belongs to user 1000". A link is
/// refused. In a folder of their own, other users could replace files by links while they are open.
/// File systems may map users, so a new file's owner decides if the ids differ.
std::string why_not_own_folder(const std::string& path);

}  // namespace ddp::detail
