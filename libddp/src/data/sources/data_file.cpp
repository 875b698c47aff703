// SPDX-License-Identifier: Apache-2.0
#include "data/sources/data_file.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <system_error>
#include <utility>

#include "core/files/file_ops.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

namespace {

namespace fs = std::filesystem;

}  // namespace

fs::file_type file_type_of(const fs::path& path) {
  std::error_code error;
  const fs::file_type type = fs::status(path, error).type();
  if (type == fs::file_type::none) {
    throw DataError(concat("cannot read ", path.string(), ": ", error.message(),
                           "; fix: check the path, its links and its permissions"));
  }
  return type;
}

bool path_exists(const fs::path& path) {
  return file_type_of(path) != fs::file_type::not_found;
}

std::vector<std::string> read_names(const std::string& path) {
  constexpr size_t kMaxBytes = size_t{64} << 20;
  std::string why;
  std::string text = read_start(path, kMaxBytes + 1, why).value_or("");
  if (text.size() > kMaxBytes) {
    why = "it is larger than 64 MiB, which no list of names is";
  }
  if (!why.empty()) {
    throw DataError(concat("class names ", path, ": ", why, kDataFileFix));
  }
  if (text.starts_with("\xEF\xBB\xBF")) {  // UTF-8's byte order mark
    text.erase(0, 3);
  }
  std::vector<std::string> names;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    if (line.ends_with('\r')) {
      line.pop_back();
    }
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

std::string DataFile::start(int64_t num_bytes) const {
  std::string bytes(static_cast<size_t>(std::min(num_bytes, size_)), '\0');
  read_at(0, bytes.data(), std::ssize(bytes));
  return bytes;
}

}  // namespace ddp::detail
