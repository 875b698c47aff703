// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace ddp::detail {

/// State that would be made while a graph records would be made again by every replay.
/// Throws SettingsError naming `what` and the fix.
void refuse_to_make_while_capturing(const std::string& what);

}  // namespace ddp::detail
