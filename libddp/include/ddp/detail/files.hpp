// SPDX-License-Identifier: Apache-2.0
// Writes files so that each is complete or absent after a crash. Tests replace the table of system
// calls to interrupt a save at each call, make a call fail, or write only a part.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "ddp/core/error.hpp"

namespace ddp {

/// Each member is the system call of its name, with the kernel's result and errno.
class FileOps {
 public:
  virtual ~FileOps() = default;
  virtual int open(const char* path, int flags, mode_t mode);
  virtual ssize_t write(int fd, const void* data, std::size_t size);
  virtual int fsync(int fd);
  virtual int close(int fd);
  virtual int rename(const char* from, const char* to);
  /// renameat2 with RENAME_EXCHANGE; some file systems lack it.
  virtual int exchange(const char* one, const char* other);
  virtual int mkdir(const char* path, mode_t mode);
  virtual int unlink(const char* path);
  virtual int rmdir(const char* path);
};

FileOps& system_file_ops();

/// A failed system call on a file. The message ends with a fix for `error`.
struct FileError : WriteError {
  /// "cannot open /ckpt/x: Permission denied; fix: let this user write there".
  FileError(const std::string& what, int error_in);
  int error;  ///< errno
};

/// A file's entry in a manifest.
struct FileRecord {
  std::string name;
  uint64_t size = 0;
  uint64_t xxh3 = 0;       ///< XXH3, 64 bits
  bool has_parts = false;  ///< its tensors are parts of whole ones
  bool operator==(const FileRecord&) const = default;
  friend auto message_fields(FileRecord& file) {
    return std::tie(file.name, file.size, file.xxh3, file.has_parts);
  }
};

uint64_t xxh3(std::string_view bytes);

/// Permissions of new files: owner only (a run's state), or as the umask allows.
inline constexpr mode_t kPrivateFile = 0600, kPublicFile = 0666;

/// Whether a file is on disk when a call returns, or may be lost in a power failure: the metrics of
/// a run are replaced every second, and a sync takes milliseconds.
enum class Durability { Synced, Cached };

/// Creates `folder`/`name` with permissions `mode`, writes `chunks` and syncs them to disk. The
/// file must not exist; links are not followed. On failure removes the partial file and throws
/// FileError naming the file and the system's reason.
FileRecord write_new_file(FileOps& ops, const std::string& folder, const std::string& name,
                          const std::vector<std::string_view>& chunks, mode_t mode = kPrivateFile,
                          Durability durability = Durability::Synced);

/// Syncs the folder's entries (creations, renames) to disk. Throws FileError.
void sync_folder(FileOps& ops, const std::string& folder);

/// Atomically replaces `path` with a public file of `chunks`, and syncs file and folder.
void replace_file(FileOps& ops, const std::string& path,
                  const std::vector<std::string_view>& chunks,
                  Durability durability = Durability::Synced);

/// 16 random hexadecimal digits.
std::string random_suffix();
/// Whether replace_file() makes files of this name before it renames them.
bool is_unfinished_name(std::string_view name);

/// Removes the files of `folder` and the folder itself. Best effort, never throws.
void remove_folder(FileOps& ops, const std::string& folder) noexcept;

}  // namespace ddp
