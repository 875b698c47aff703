// SPDX-License-Identifier: Apache-2.0
// Parses untrusted JSON. Nlohmann's writer and comparisons recurse, and its lexer stops at a zero
// byte.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

#include "ddp/core/error.hpp"

namespace ddp::detail {

/// Nlohmann's get<int64_t>() accepts fractions, and is undefined for numbers out of range.
template <typename Json>
bool fits_int64(const Json& json) {
  return json.is_number_integer() &&
         (!json.is_number_unsigned() ||
          json.template get<uint64_t>() <= uint64_t{std::numeric_limits<int64_t>::max()});
}

/// Throws ReadError for a zero byte and for nesting deeper than `max_depth`.
/// Throws nlohmann::json::exception for invalid JSON. The caller adds the file name to the message.
template <typename Json>
Json parse_bounded_json(std::string_view text, int max_depth) {
  if (text.find('\0') != std::string_view::npos) {
    throw ReadError("it holds a zero byte");
  }
  return Json::parse(text.begin(), text.end(),
                     [max_depth](int depth, typename Json::parse_event_t, Json&) {
                       if (depth > max_depth) {
                         throw ReadError("it is nested too deeply");
                       }
                       return true;
                     });
}

}  // namespace ddp::detail
