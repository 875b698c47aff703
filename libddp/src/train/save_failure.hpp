// SPDX-License-Identifier: Apache-2.0
// A failed save: every rank throws it, so it names the rank that failed. Torch-free.
#pragma once

#include "core/failure_cause.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

/// Appended to a FileError's fix.
inline constexpr const char* kOtherFolder = ", or name another checkpoint.dir";

struct SaveFailure : WriteError {
  SaveFailure(int rank_in, const std::string& message) : WriteError(message), rank(rank_in) {}
  FailureCause cause() const {
    FailureCause cause;
    cause.rank = rank;
    cause.message = what();
    cause.exit_code = exit_code();
    return cause;
  }
  int rank;  ///< the rank that could not write
};

}  // namespace ddp::detail
