// SPDX-License-Identifier: Apache-2.0
// Calls that wait for other ranks, made by a destructor while an exception unwinds.
#pragma once

#include <exception>

#include "ddp/core/error.hpp"

namespace ddp::detail {

/// Throws while an exception unwinds in this thread. The peers do not know of the exception yet: a
/// destructor that waited for them would wait for ranks that wait for this one.
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
