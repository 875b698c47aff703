// SPDX-License-Identifier: Apache-2.0
#include "ddp/detail/text.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "ddp/detail/utf8.hpp"

namespace ddp::detail {
namespace {

// Control characters, line and paragraph separators, and marks that reorder text.
bool is_unsafe(uint32_t code) {
  return code < 0x20 || (code >= 0x7F && code < 0xA0) || code == 0x061C ||
         (code >= 0x200E && code <= 0x200F) || (code >= 0x2028 && code <= 0x202E) ||
         (code >= 0x2066 && code <= 0x2069);
}

// Escapes characters that are unsafe and not in `kept`.
std::string escape(std::string_view text, std::string_view kept) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const Utf8Character character = first_character(text);
    const std::size_t size = std::max<std::size_t>(character.size, 1);
    const bool is_kept = size == 1 && kept.find(text[0]) != std::string_view::npos;
    if (is_kept || (character.size != 0 && !is_unsafe(character.code))) {
      result += text.substr(0, size);
    } else {
      for (const char c : text.substr(0, size)) {
        char escaped[8];
        std::snprintf(escaped, sizeof escaped, "\\x%02x", static_cast<unsigned char>(c));
        result += escaped;
      }
    }
    text.remove_prefix(size);
  }
  return result;
}

}  // namespace

ClassicNumbers::ClassicNumbers() {
  static const locale_t classic = ::newlocale(LC_ALL_MASK, "C", nullptr);
  before_ = ::uselocale(classic);
}

ClassicNumbers::~ClassicNumbers() {
  ::uselocale(before_);
}

Utf8Character first_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) {
    return {first, 1};
  }
  const std::size_t size = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < size) {
    return {};
  }
  uint32_t code = first & (0x7Fu >> size);
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xC0) != 0x80) {
      return {};
    }
    code = code << 6 | (byte(i) & 0x3Fu);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xD800 && code < 0xE000;
  return code < kLeast[size] || code > 0x10FFFF || is_surrogate ? Utf8Character{}
                                                                : Utf8Character{code, size};
}

std::string printable(std::string_view text) {
  return escape(text, "\n\t");
}

std::string printable_line(std::string_view text) {
  return escape(text, "");
}

}  // namespace ddp::detail
