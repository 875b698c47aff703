// SPDX-License-Identifier: Apache-2.0
#include "data/data_file.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <sstream>
#include <utility>

#include "core/file_ops.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

std::vector<std::string> read_names(const std::string& path) {
  std::string why;
  const auto text = read_start(path, 64u << 20, why);
  if (!text) {
    throw DataError(concat("class names ", path, ": ", why, kDataFileFix));
  }
  std::vector<std::string> names;
  std::istringstream in(*text);
  for (std::string line; std::getline(in, line) && names.size() < 1'000'000;) {
    if (!line.empty()) {
      names.push_back(line);
    }
  }
  return names;
}

DataFile::DataFile(const std::string& path) : path_(path) {
  std::string why;
  descriptor_ = open_to_read(path, why);
  if (descriptor_ < 0) {
    throw DataError(concat("cannot open data file ", path, ": ", why, kDataFileFix));
  }
  struct stat info {};
  if (::fstat(descriptor_, &info) != 0) {
    ::close(descriptor_);
    throw DataError(
        concat("cannot read data file ", path, ": ", std::strerror(errno), kDataFileFix));
  }
  size_ = info.st_size;
}

DataFile::~DataFile() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
  }
}

DataFile::DataFile(DataFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_(other.size_) {}

void DataFile::read_at(int64_t offset, void* out, int64_t num_bytes) const {
  auto* target = static_cast<char*>(out);
  while (num_bytes > 0) {
    const ssize_t n = ::pread(descriptor_, target, static_cast<size_t>(num_bytes), offset);
    if (n < 0 && errno == EINTR) {
      continue;
    }
    if (n < 0) {
      throw DataError(concat("cannot read ", path_, " at offset ", offset, ": ",
                             std::strerror(errno), kDataFileFix));
    }
    if (n == 0) {
      throw DataError(concat("data file ", path_, " is truncated: it ends at offset ", offset, ", ",
                             num_bytes, " more bytes are needed", kDataFileFix));
    }
    target += n;
    offset += n;
    num_bytes -= n;
  }
}

}  // namespace ddp::detail
