// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "ddp/core/error.hpp"

namespace ddp::detail {

[[noreturn]] inline void fail_check(const char* condition, const char* file, int line,
                                    const std::string& message) {
  throw InternalError(concat("libddp bug: ", condition, " is false at ", file, ":", line,
                             message.empty() ? "" : ": ", message));
}

}  // namespace ddp::detail

/// Checks an invariant of libddp; the optional arguments are joined into the message.
#define DDP_CHECK(condition, ...)                                              \
  do {                                                                         \
    if (!(condition)) [[unlikely]] {                                           \
      ::ddp::detail::fail_check(#condition, __FILE__, __LINE__,                \
                                ::ddp::concat("" __VA_OPT__(, ) __VA_ARGS__)); \
    }                                                                          \
  } while (false)
