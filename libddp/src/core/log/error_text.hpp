// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace ddp::detail {

/// what(), of LibTorch's errors without the backtrace.
inline std::string message_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error == nullptr ? error.what() : torch_error->what_without_backtrace();
}

}  // namespace ddp::detail
