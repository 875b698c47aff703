// SPDX-License-Identifier: Apache-2.0
// A second place of the log beside standard error.
#pragma once

#include <string>

namespace ddp::detail {

/// Also appends all later log lines of this process to `path`, until the next call or the end of
/// the process: the folder of a failed run then has its error. Logs a warning if the file cannot be
/// opened. Any thread.
void append_log_to(const std::string& path);

}  // namespace ddp::detail
