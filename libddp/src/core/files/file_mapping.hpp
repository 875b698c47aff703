// SPDX-License-Identifier: Apache-2.0
// Files in memory, and tensors over their bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <string>

namespace ddp::detail {

/// A private mapping of a whole file. It shares pages with the page cache until they are written,
/// and never writes to the file.
class FileMapping {
 public:
  /// On failure returns nullptr and sets `why`.
  static std::shared_ptr<FileMapping> open(const std::string& path, std::string& why);
  ~FileMapping();
  FileMapping(const FileMapping&) = delete;
  FileMapping& operator=(const FileMapping&) = delete;

  unsigned char* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  FileMapping() = default;

  unsigned char* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Returns a tensor over the pages of `mapping` from `offset`, or a copy if these are not aligned.
/// The bytes of the tensor must be in the file.
at::Tensor tensor_over(const std::shared_ptr<FileMapping>& mapping, std::size_t offset,
                       at::IntArrayRef sizes, at::ScalarType dtype);

/// Whether all bytes are 0 or 1. Another bool is undefined behaviour in every kernel.
bool are_bools(const unsigned char* data, std::size_t size);

}  // namespace ddp::detail
