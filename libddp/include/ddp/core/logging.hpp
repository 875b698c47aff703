// SPDX-License-Identifier: Apache-2.0
// Log lines with rank and time. Rank 0 logs from Info on, the others from Warning on.
#pragma once

#include <string>

namespace ddp {

enum class LogLevel { Debug, Info, Warning, Error };  ///< ascending

/// Drops lines below `level`. DDP_LOG_LEVEL=debug|info|warning|error overrides it.
void set_log_level(LogLevel level);
bool is_logged(LogLevel level);  ///< false for lines that would be dropped
void set_log_rank(int rank);     ///< shown in each line; -1 (the default) shows none
/// Writes one whole line to standard error, so lines of ranks do not mix. Thread safe.
void log(LogLevel level, const std::string& message);
void log_debug(const std::string& message);    ///< log(LogLevel::Debug, message)
void log_info(const std::string& message);     ///< log(LogLevel::Info, message)
void log_warning(const std::string& message);  ///< log(LogLevel::Warning, message)
void log_error(const std::string& message);    ///< log(LogLevel::Error, message)

}  // namespace ddp
