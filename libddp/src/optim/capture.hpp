// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace ddp::detail {

/// Whether this thread's current CUDA stream is capturing. Never initializes CUDA.
bool stream_is_capturing();

/// Throws SettingsError naming `what` and the fix if a graph is being captured: every replay would
/// make the state again.
void refuse_to_make_while_capturing(const std::string& what);

}  // namespace ddp::detail
