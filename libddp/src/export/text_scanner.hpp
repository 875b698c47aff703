// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <optional>
#include <string_view>

namespace ddp::detail {

/// Base of classes that read a text part by part. Blanks before a part are skipped.
class TextScanner {
 protected:
  explicit TextScanner(std::string_view text) : rest_(text) {}

  void skip_blanks() { rest_.remove_prefix(std::min(rest_.find_first_not_of(' '), rest_.size())); }

  bool take(std::string_view symbol) {
    skip_blanks();
    if (!rest_.starts_with(symbol)) {
      return false;
    }
    rest_.remove_prefix(symbol.size());
    return true;
  }

  template <typename Belongs>
  std::string_view take_while(const Belongs& belongs) {
    skip_blanks();
    const auto end = std::find_if_not(rest_.begin(), rest_.end(), belongs);
    return take_first(static_cast<std::size_t>(end - rest_.begin()));
  }

  /// The text before `end`, which is taken too. Empty if the text has no `end`.
  std::optional<std::string_view> take_until(std::string_view end) {
    const auto length = rest_.find(end);
    if (length == std::string_view::npos) {
      return std::nullopt;
    }
    const auto text = take_first(length);
    rest_.remove_prefix(end.size());
    return text;
  }

  std::string_view rest_;  // what is not read yet

 private:
  std::string_view take_first(std::size_t length) {
    const auto first = rest_.substr(0, length);
    rest_.remove_prefix(length);
    return first;
  }
};

}  // namespace ddp::detail
