// SPDX-License-Identifier: Apache-2.0
// A last line of the terminal, such as a progress bar, which log lines do not run into.
#pragma once

#include <string>

namespace ddp::detail {

/// Shows `text` below all log lines until clear_terminal_line(). Any thread.
void show_terminal_line(const std::string& text);
void clear_terminal_line();

}  // namespace ddp::detail
