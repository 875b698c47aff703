// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace ddp::detail {

/// `text` with the letters A to Z in lower case, in any locale. Other bytes stay.
inline std::string lower_case(std::string text) {
  for (char& c : text) {
    c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return text;
}

}  // namespace ddp::detail
