// SPDX-License-Identifier: Apache-2.0
// A file read by position, from any thread, without a shared offset. Unlike a mapping it causes no
// page faults, and a file truncated while reading is an error, not a signal.
#pragma once

#include <cstdint>
#include <string>

namespace models::detail {

class PositionedFile {
 public:
  /// Throws ddp::ReadError unless `path` is a regular file that can be read.
  explicit PositionedFile(std::string path);
  ~PositionedFile();
  PositionedFile(PositionedFile&& other) noexcept;
  PositionedFile(const PositionedFile&) = delete;
  PositionedFile& operator=(const PositionedFile&) = delete;
  PositionedFile& operator=(PositionedFile&&) = delete;

  uint64_t size() const { return size_; }
  /// Bytes offset … offset + num_bytes into `data`. Throws ddp::ReadError.
  void read(uint64_t offset, void* data, uint64_t num_bytes) const;

 private:
  std::string path_;
  int fd_ = -1;
  uint64_t size_ = 0;
};

}  // namespace models::detail
