// SPDX-License-Identifier: Apache-2.0
// UTF-8, the encoding of all texts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ddp::detail {

/// A character of a text.
struct Utf8Character {
  uint32_t code = 0;     ///< its number in Unicode
  std::size_t size = 0;  ///< bytes; 0: invalid
};

/// Decodes the character at the start of `text`, which is not empty. The Unicode Standard, table
/// 3-7: overlong forms, surrogates and numbers above U+10FFFF are invalid.
Utf8Character first_character(std::string_view text);

/// As printable(), but escapes tabs and ends of lines too: for a text inside a line.
std::string printable_line(std::string_view text);

}  // namespace ddp::detail
