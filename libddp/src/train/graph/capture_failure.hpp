// SPDX-License-Identifier: Apache-2.0
// Readable reasons of failed captures.
#pragma once

#include <ATen/record_function.h>

#include <exception>
#include <string>

namespace ddp::detail {

/// Records the operation that first raised an exception during this object's lifetime, on all
/// threads, because backward has its own threads. One object at a time.
class FailingOperation {
 public:
  FailingOperation();
  ~FailingOperation();
  FailingOperation(const FailingOperation&) = delete;
  FailingOperation& operator=(const FailingOperation&) = delete;

  /// "aten::_local_scalar_dense, in aten::item"; empty: none was recorded.
  std::string names() const;

 private:
  at::CallbackHandle handle_;
};

/// Why a capture failed, for a message: from the exception and its first operation.
std::string capture_failure(const std::exception_ptr& error, const std::string& operation);

}  // namespace ddp::detail
