// SPDX-License-Identifier: Apache-2.0
#include "core/files/file_mapping.hpp"

#include <ATen/ATen.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <system_error>

#include "core/control/wire/unique_fd.hpp"
#include "core/files/file_ops.hpp"

namespace ddp::detail {

std::shared_ptr<FileMapping> FileMapping::open(const std::string& path, std::string& why) {
  const UniqueFd fd(open_to_read(path, why));
  if (!fd.valid()) {
    return nullptr;
  }
  std::shared_ptr<FileMapping> mapping(new FileMapping());
  struct stat status {};
  int error = ::fstat(fd.get(), &status) != 0 ? errno : 0;
  mapping->size_ = static_cast<std::size_t>(status.st_size);
  if (error == 0 && mapping->size_ > 0) {
    // Without MAP_NORESERVE the system refuses a file larger than the memory, because each page
    // could be written.
    void* memory = ::mmap(nullptr, mapping->size_, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_NORESERVE, fd.get(), 0);
    error = memory == MAP_FAILED ? errno : 0;
    mapping->data_ = memory == MAP_FAILED ? nullptr : static_cast<unsigned char*>(memory);
  }
  if (error != 0) {
    why = std::generic_category().message(error);
    return nullptr;
  }
  return mapping;
}

FileMapping::~FileMapping() {
  if (data_ != nullptr) {
    ::munmap(data_, size_);
  }
}

at::Tensor tensor_over(const std::shared_ptr<FileMapping>& mapping, std::size_t offset,
                       at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype);
  unsigned char* data = mapping->data() + offset;
  const std::size_t alignment = options.dtype().itemsize();
  const bool is_empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  // Writers need not align data; kernels may require alignment.
  if (is_empty || reinterpret_cast<uintptr_t>(data) % alignment != 0) {
    at::Tensor copy = at::empty(sizes, options);
    if (!is_empty) {
      std::memcpy(copy.data_ptr(), data, copy.nbytes());
    }
    return copy;
  }
  return at::from_blob(
      data, sizes, [mapping](void*) {}, options);
}

bool are_bools(const unsigned char* data, std::size_t size) {
  return std::all_of(data, data + size, [](unsigned char byte) { return byte <= 1; });
}

}  // namespace ddp::detail
