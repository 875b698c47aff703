// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace ddp::detail {

/// Whether this thread's current CUDA stream records a graph. Never starts CUDA.
bool is_capturing();

/// State that would be made while a graph records would be made again by every replay.
/// Throws SettingsError naming `what` and the fix.
void refuse_to_make_while_capturing(const std::string& what);

}  // namespace ddp::detail
