// SPDX-License-Identifier: Apache-2.0
#include "pretrained/positioned_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "ddp/core/error.hpp"

namespace models::detail {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& why) {
  throw ddp::ReadError("cannot read " + path + ": " + why);
}

[[noreturn]] void fail(const std::string& path, int error) {
  fail(path, std::generic_category().message(error));
}

}  // namespace

PositionedFile::PositionedFile(std::string path) : path_(std::move(path)) {
  // O_NONBLOCK: a named pipe is refused below instead of blocking until a writer opens it.
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) {
    fail(path_, errno);
  }
  struct stat status {};
  const int error = ::fstat(fd_, &status) != 0 ? errno : 0;
  if (error != 0 || !S_ISREG(status.st_mode)) {
    ::close(fd_);
    fail(path_, error != 0 ? std::generic_category().message(error) : "it is not a regular file");
  }
  size_ = static_cast<uint64_t>(status.st_size);
}

PositionedFile::PositionedFile(PositionedFile&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), size_(other.size_) {}

PositionedFile::~PositionedFile() {
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

void PositionedFile::read(uint64_t offset, void* data, uint64_t num_bytes) const {
  auto* bytes = static_cast<char*>(data);
  while (num_bytes > 0) {
    const ssize_t got = ::pread(fd_, bytes, num_bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      fail(path_, errno);
    }
    if (got == 0) {
      throw ddp::ReadError(
          ddp::concat(path_, " ended at byte ", offset, " while it was read (it had ", size_, ")"));
    }
    bytes += got;
    offset += static_cast<uint64_t>(got);
    num_bytes -= static_cast<uint64_t>(got);
  }
}

}  // namespace models::detail
