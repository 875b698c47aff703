// SPDX-License-Identifier: Apache-2.0
// Guard for calls that wait for other ranks, made by destructors while an exception unwinds.
#pragma once

#include <exception>

#include "ddp/core/error.hpp"

namespace ddp::detail {

/// Throws while an exception unwinds in this thread. Peers do not know the exception yet: a
/// destructor that waits for them would deadlock.
inline void refuse_while_unwinding(const char* operation) {
  if (std::uncaught_exceptions() > 0) [[unlikely]] {
    throw Error(
        ExitCode::UserException,
        concat(operation,
               ": a destructor called it while an exception unwinds, and the other ranks do "
               "not know of the exception yet; fix: skip the call while "
               "std::uncaught_exceptions() is above 0"));
  }
}

}  // namespace ddp::detail
