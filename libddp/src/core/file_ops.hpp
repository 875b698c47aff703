// SPDX-License-Identifier: Apache-2.0
// The system calls a save makes, as a table that a test can replace: to cut a save at each of them,
// to fail each of them, or to write only a part.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ddp/core/error.hpp"

namespace ddp::detail {

/// Each member is the system call of its name: result and errno are the kernel's.
class FileOps {
 public:
  virtual ~FileOps() = default;
  virtual int open(const char* path, int flags, mode_t mode);
  virtual ssize_t write(int fd, const void* data, std::size_t size);
  virtual int fsync(int fd);
  virtual int close(int fd);
  virtual int rename(const char* from, const char* to);
  /// renameat2 with RENAME_EXCHANGE: some file systems do not have it.
  virtual int exchange(const char* one, const char* other);
  virtual int mkdir(const char* path, mode_t mode);
  virtual int unlink(const char* path);
  virtual int rmdir(const char* path);
};

FileOps& system_file_ops();

/// A system call on a file that failed. The message ends with what a user can do about `error`.
struct FileError : WriteError {
  /// "cannot open /ckpt/x: Permission denied; fix: let this user write there".
  FileError(const std::string& what, int error_in);
  int error;  ///< errno
};

/// What a manifest says of a file.
struct FileRecord {
  std::string name;
  uint64_t size = 0;
  uint64_t xxh3 = 0;  ///< XXH3, 64 bits
  bool operator==(const FileRecord&) const = default;
};

uint64_t xxh3(std::string_view bytes);

/// Rights of new files: of the owner alone (a run's state), or what the umask leaves (what others
/// are to read).
inline constexpr mode_t kPrivate = 0600, kPublished = 0666;

/// Creates `folder`/`name` (of rights `mode`, must not exist, no link followed), writes `chunks`
/// and forces them to the disk. Short writes and EINTR are continued. On failure throws FileError
/// naming the file and the system's reason, after removing the part.
FileRecord write_new_file(FileOps& ops, const std::string& folder, const std::string& name,
                          const std::vector<std::string_view>& chunks, mode_t mode = kPrivate);

/// Whether a symbolic link in the last part of a path is followed.
enum class Links { Follow, Refuse };

/// A descriptor to read the regular file `path`, or -1 and `why` (with errno) tells why not.
/// Anything else of that name is refused at once: a named pipe would wait for somebody to write.
int open_to_read(const std::string& path, std::string& why, Links links = Links::Follow);

/// The first `limit` bytes of the regular file `path`, or all that it has. None where it cannot be
/// read, and `why` tells why not.
std::optional<std::string> read_start(const std::string& path, std::size_t limit, std::string& why,
                                      Links links = Links::Follow);

/// Forces the folder's entries (creations, renames) to the disk. Throws FileError.
void sync_folder(FileOps& ops, const std::string& folder);

/// `path` becomes a published file of `chunks`, atomically: temporary name, fsync, rename, fsync of
/// the folder.
void replace_file(FileOps& ops, const std::string& path,
                  const std::vector<std::string_view>& chunks);

/// 16 hexadecimal digits nobody can guess.
std::string random_suffix();

/// Best effort, never throws: removes the files of `folder` and the folder itself.
void remove_folder(FileOps& ops, const std::string& folder) noexcept;

}  // namespace ddp::detail
