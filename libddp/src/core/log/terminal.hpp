// SPDX-License-Identifier: Apache-2.0
// Text for a person at a terminal.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace ddp {

/// Columns of the terminal that the file descriptor `file` is; nothing if it is none.
std::optional<int> terminal_columns(int file);

/// Columns of $COLUMNS, of standard output's terminal, or 80; from 40 to 120.
std::size_t terminal_width();

/// Prints `text`. If standard input and output are a terminal, it goes through $PAGER (empty: no
/// pager), or else `less -FRX` if that is installed.
void print_paged(const std::string& text);

}  // namespace ddp
