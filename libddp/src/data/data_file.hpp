// SPDX-License-Identifier: Apache-2.0
// A data file opened for reading at offsets by any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ddp::detail {

/// What a user can do about a data file that is missing or damaged: the end of such messages.
inline constexpr const char* kDataFileFix =
    "; fix: fetch or prepare the file again (data/README.md; CIFAR-10: data/prepare_cifar10.py)";

class DataFile {
 public:
  /// Throws DataError naming the path and the system's reason; also where it is no regular file.
  explicit DataFile(const std::string& path);
  ~DataFile();
  DataFile(DataFile&& other) noexcept;
  DataFile& operator=(DataFile&&) = delete;
  DataFile(const DataFile&) = delete;
  DataFile& operator=(const DataFile&) = delete;

  /// Exactly `num_bytes` from `offset`. Throws DataError naming path and offset where the file ends
  /// earlier (it may have been cut since it was opened) or cannot be read. Any thread.
  void read_at(int64_t offset, void* out, int64_t num_bytes) const;

  int64_t size() const { return size_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
};

}  // namespace ddp::detail
