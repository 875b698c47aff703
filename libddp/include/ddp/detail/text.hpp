// SPDX-License-Identifier: Apache-2.0
// Text that does not depend on the program's locale and does not control a terminal.
#pragma once

#include <locale.h>

#include <string>
#include <string_view>

#include "ddp/detail/text_stream.hpp"

namespace ddp::detail {

/// For its lifetime, this thread's printf, scanf and strtod use the locale "C": a decimal point,
/// whatever std::setlocale() or std::locale::global() chose.
class ClassicNumbers {
 public:
  ClassicNumbers();
  ~ClassicNumbers();
  ClassicNumbers(const ClassicNumbers&) = delete;
  ClassicNumbers& operator=(const ClassicNumbers&) = delete;

 private:
  locale_t before_;
};

/// `text` with escapes such as \x1b in place of control characters, invalid UTF-8, and characters
/// that reorder text. Tabs and ends of lines stay. For names and messages that other programs,
/// files or users chose: a terminal would obey their control characters.
std::string printable(std::string_view text);

}  // namespace ddp::detail
