// SPDX-License-Identifier: Apache-2.0
#include "core/files/file_ops.hpp"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "core/control/wire/unique_fd.hpp"
#include "ddp/core/error.hpp"

namespace ddp {
namespace {

// Limit per write call: a full disk is noticed early, and signals wait briefly.
constexpr std::size_t kWriteBytes = 64u << 20;
// In the name of a file that replace_file() has not renamed yet, before a random suffix.
constexpr std::string_view kUnfinished = ".tmp-";

const char* fix_for(int error) {
  switch (error) {
    case ENOSPC:
      return "free space there";
    case EDQUOT:
      return "free space of this user's quota there";
    case EROFS:
      return "mount that file system for writing";
    case EACCES:
    case EPERM:
      return "let this user write there";
    case EMFILE:
      return "raise the process's limit of open files (ulimit -n)";
    case ENFILE:
      return "raise the system's limit of open files (fs.file-max)";
    case EFBIG:
      return "raise the limit of a file's size (ulimit -f)";
    case ENOENT:
      return "create its folder, and remove nothing there while a run writes";
    case ENOTDIR:
      return "remove the file where a folder is needed";
    default:
      return "check that disk and the system's log";
  }
}

[[noreturn]] void fail(const char* what, const std::string& path, int error) {
  throw FileError(concat("cannot ", what, " ", path), error);
}

// Owns a descriptor. Success closes explicitly, because close may report a lost write.
class OpenFile {
 public:
  OpenFile(FileOps& ops, std::string path, int flags, mode_t mode = 0)
      : ops_(ops), path_(std::move(path)) {
    do {
      fd_ = ops_.open(path_.c_str(), flags | O_CLOEXEC, mode);
    } while (fd_ < 0 && errno == EINTR);
    if (fd_ < 0) {
      fail("open", path_, errno);
    }
  }
  ~OpenFile() {
    if (fd_ >= 0) {
      ops_.close(fd_);
    }
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  void write(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t written = ops_.write(fd_, bytes.data(), std::min(bytes.size(), kWriteBytes));
      if (written < 0 && errno == EINTR) {
        continue;
      }
      if (written <= 0) {
        fail("write", path_, written == 0 ? ENOSPC : errno);
      }
      bytes.remove_prefix(static_cast<std::size_t>(written));
    }
  }
  void sync() {
    int result = 0;
    do {
      result = ops_.fsync(fd_);
    } while (result != 0 && errno == EINTR);
    if (result != 0) {
      fail("sync", path_, errno);
    }
  }
  void close() {
    const int fd = std::exchange(fd_, -1);
    // Linux frees the descriptor even if close returns EINTR.
    if (ops_.close(fd) != 0 && errno != EINTR) {
      fail("close", path_, errno);
    }
  }

 private:
  FileOps& ops_;
  std::string path_;
  int fd_ = -1;
};

}  // namespace

int FileOps::open(const char* path, int flags, mode_t mode) {
  return ::open(path, flags, mode);
}
ssize_t FileOps::write(int fd, const void* data, std::size_t size) {
  return ::write(fd, data, size);
}
int FileOps::fsync(int fd) {
  return ::fsync(fd);
}
int FileOps::close(int fd) {
  return ::close(fd);
}
int FileOps::rename(const char* from, const char* to) {
  return ::rename(from, to);
}
int FileOps::exchange(const char* one, const char* other) {
  return ::renameat2(AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE);
}
int FileOps::mkdir(const char* path, mode_t mode) {
  return ::mkdir(path, mode);
}
int FileOps::unlink(const char* path) {
  return ::unlink(path);
}
int FileOps::rmdir(const char* path) {
  return ::rmdir(path);
}

FileError::FileError(const std::string& what, int error_in)
    : WriteError(concat(what, ": ", std::generic_category().message(error_in),
                        "; fix: ", fix_for(error_in))),
      error(error_in) {}

FileOps& system_file_ops() {
  static FileOps ops;  // stateless
  return ops;
}

uint64_t xxh3(std::string_view bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

FileRecord write_new_file(FileOps& ops, const std::string& folder, const std::string& name,
                          const std::vector<std::string_view>& chunks, mode_t mode,
                          Durability durability) {
  const std::string path = folder + "/" + name;
  FileRecord record{.name = name};
  OpenFile file(ops, path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, mode);
  try {
    XXH3_state_t hash;
    XXH3_64bits_reset(&hash);
    for (const auto& chunk : chunks) {
      XXH3_64bits_update(&hash, chunk.data(), chunk.size());
      file.write(chunk);
      record.size += chunk.size();
    }
    record.xxh3 = XXH3_64bits_digest(&hash);
    if (durability == Durability::Synced) {
      file.sync();
    }
    file.close();
  } catch (...) {
    ops.unlink(path.c_str());
    throw;
  }
  return record;
}

namespace {

// As open_to_read, with the flags and permissions of open().
int open_regular(const std::string& path, int flags, std::string& why) {
  int fd = -1;
  do {  // O_NONBLOCK: does not wait for the other end of a named pipe
    fd = ::open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, kPublicFile);
  } while (fd < 0 && errno == EINTR);
  struct stat status {};
  const int error = fd < 0 || ::fstat(fd, &status) != 0 ? errno : 0;
  if (error == 0 && S_ISREG(status.st_mode)) {
    return fd;
  }
  why = error != 0 ? std::generic_category().message(error) : "it is not a regular file";
  if (fd >= 0) {
    ::close(fd);
  }
  errno = error != 0 ? error : EINVAL;
  return -1;
}

}  // namespace

int detail::open_to_read(const std::string& path, std::string& why, Links links) {
  return open_regular(path, O_RDONLY | (links == Links::Refuse ? O_NOFOLLOW : 0), why);
}

std::optional<std::string> detail::read_start(const std::string& path, std::size_t limit,
                                              std::string& why, Links links) {
  const UniqueFd fd(open_to_read(path, why, links));
  if (!fd.valid()) {
    return std::nullopt;
  }
  std::string text;
  std::vector<char> buffer(std::min<std::size_t>(limit, 1u << 16));
  ssize_t count = 1;
  while (text.size() < limit && count != 0) {
    count = ::read(fd.get(), buffer.data(), std::min(buffer.size(), limit - text.size()));
    if (count < 0 && errno != EINTR) {
      why = std::generic_category().message(errno);
      return std::nullopt;
    }
    text.append(buffer.data(), static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  }
  return text;
}

std::string detail::kernel_text(const std::string& path) {
  std::string why;
  return read_start(path, 1u << 16, why).value_or("");
}

std::unique_ptr<detail::AppendedFile> detail::AppendedFile::open(const std::string& path,
                                                                 std::string& why) {
  const int fd = open_regular(path, O_WRONLY | O_APPEND | O_CREAT | O_NOFOLLOW, why);
  return fd < 0 ? nullptr : std::unique_ptr<AppendedFile>(new AppendedFile(fd));
}

detail::AppendedFile::~AppendedFile() {
  ::close(fd_);
}

bool detail::AppendedFile::is_empty() const {
  struct stat status {};
  return ::fstat(fd_, &status) == 0 && status.st_size == 0;
}

bool detail::AppendedFile::append(std::string_view bytes, std::string& why) {
  const off_t size = ::lseek(fd_, 0, SEEK_END);
  while (size >= 0 && !bytes.empty()) {
    const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written <= 0) {
      break;
    }
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  if (bytes.empty()) {
    return true;
  }
  why = std::generic_category().message(errno);
  if (size >= 0) {  // the next line, which may succeed, is then whole
    [[maybe_unused]] const int ignored = ::ftruncate(fd_, size);
  }
  return false;
}

std::string detail::why_not_own_folder(const std::string& path) {
  const detail::UniqueFd folder(
      ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!folder.valid() || ::fstat(folder.get(), &status) != 0) {
    const int error = errno;
    struct stat link {};
    const bool is_link = ::lstat(path.c_str(), &link) == 0 && S_ISLNK(link.st_mode);
    return is_link ? "it is a symbolic link" : std::generic_category().message(error);
  }
  if (status.st_uid == ::geteuid()) {
    return "";
  }
  const auto name = ".try_" + random_suffix();
  const detail::UniqueFd made(::openat(folder.get(), name.c_str(),
                                       O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                                       kPrivateFile));
  struct stat own {};
  const bool is_own = made.valid() && ::fstat(made.get(), &own) == 0 && own.st_uid == status.st_uid;
  if (made.valid()) {
    ::unlinkat(folder.get(), name.c_str(), 0);
  }
  return is_own ? "" : concat("it belongs to user ", status.st_uid);
}

void sync_folder(FileOps& ops, const std::string& folder) {
  OpenFile file(ops, folder, O_RDONLY | O_DIRECTORY);
  file.sync();
  file.close();
}

void replace_file(FileOps& ops, const std::string& path,
                  const std::vector<std::string_view>& chunks, Durability durability) {
  const auto slash = path.find_last_of('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const std::string temporary = concat(path.substr(slash + 1), kUnfinished, random_suffix());
  write_new_file(ops, folder, temporary, chunks, kPublicFile, durability);
  const std::string from = folder + "/" + temporary;
  if (ops.rename(from.c_str(), path.c_str()) != 0) {
    const int error = errno;
    ops.unlink(from.c_str());
    fail("rename a finished file to", path, error);
  }
  if (durability == Durability::Synced) {
    sync_folder(ops, folder);
  }
}

bool is_unfinished_name(std::string_view name) {
  const auto mark = name.rfind(kUnfinished);
  return mark != std::string_view::npos && mark + kUnfinished.size() + 16 == name.size() &&
         name.find_first_not_of("0123456789abcdef", mark + kUnfinished.size()) ==
             std::string_view::npos;
}

std::string random_suffix() {
  uint64_t bits = 0;
  if (::getrandom(&bits, sizeof bits, 0) != sizeof bits) {
    throw WriteError("the system gave no random bytes for the name of a temporary file");
  }
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(bits));
  return text;
}

void remove_folder(FileOps& ops, const std::string& folder) noexcept {
  std::error_code ignored;
  if (std::filesystem::is_symlink(folder, ignored)) {
    ops.unlink(folder.c_str());  // what it points to belongs to someone else
    return;
  }
  for (std::filesystem::directory_iterator it(folder, ignored), end; !ignored && it != end;
       it.increment(ignored)) {
    ops.unlink(it->path().c_str());
  }
  ops.rmdir(folder.c_str());
}

}  // namespace ddp
