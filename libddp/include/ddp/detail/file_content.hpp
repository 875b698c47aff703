// SPDX-License-Identifier: Apache-2.0
// Names the contents of a file that is not what its reader expects.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ddp {

/// Bytes from a file's start that describe_content() needs at most.
inline constexpr std::size_t kContentBytes = 512;

/// Names what a file holds by its first bytes, for messages: "a Git LFS pointer", "an HTML page",
/// "text", "a zip archive". Returns an empty string for unknown bytes. For pointers, pages and
/// pickles the name contains the way to the real file.
std::string describe_content(std::string_view start);

/// "; it is an HTML page, as of a failed download" after the error of a reader; empty if unknown.
std::string content_note(std::string_view start);

}  // namespace ddp
