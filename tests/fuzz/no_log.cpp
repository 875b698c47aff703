// SPDX-License-Identifier: Apache-2.0
// In place of the library's log, which would print a line for many inputs.
#include "ddp/core/logging.hpp"

namespace ddp {

void set_log_level(LogLevel) {}
bool is_logged(LogLevel) {
  return false;
}
void set_log_rank(int) {}
void log(LogLevel, const std::string&) {}
void log_debug(const std::string&) {}
void log_info(const std::string&) {}
void log_warning(const std::string&) {}
void log_error(const std::string&) {}

}  // namespace ddp
