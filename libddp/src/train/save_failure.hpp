// SPDX-License-Identifier: Apache-2.0
// A save that failed: told by every rank alike, so it names the rank to blame. Torch-free.
#pragma once

#include "ddp/core/error.hpp"

namespace ddp::detail {

/// Behind a FileError's fix.
inline constexpr const char* kOtherFolder = ", or name another checkpoint.dir";

struct SaveFailure : WriteError {
  SaveFailure(int rank_in, const std::string& message) : WriteError(message), rank(rank_in) {}
  int rank;  ///< that could not write
};

/// What a Checkpointer's destructor, which cannot throw, has to say of a run's last save. The next
/// throw_unsaved() of the process throws it.
void note_unsaved(const SaveFailure& failure);
void throw_unsaved();
/// Before a run: what an earlier one in this process left is not its own.
void forget_unsaved();

}  // namespace ddp::detail
