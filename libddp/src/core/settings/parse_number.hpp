// SPDX-License-Identifier: Apache-2.0
// Strict number parsing: the whole string, no locale, no leading blanks or plus.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>

namespace ddp::detail {

template <typename T>
std::optional<T> parse_number(std::string_view text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) {
    return std::nullopt;
  }
  return value;
}

}  // namespace ddp::detail
