// SPDX-License-Identifier: Apache-2.0
// Text that depends neither on the program's locale nor controls a terminal.
#include "ddp/detail/text.hpp"

#include <clocale>
#include <cstdio>
#include <cstdlib>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "ddp/detail/utf8.hpp"
#include "support/catch.hpp"
#include "support/grouping_locale.hpp"
#include "support/stderr_of.hpp"
#include "unit/train/temporary_folder.hpp"

using ddp::detail::ClassicNumbers;
using ddp::detail::printable;

namespace {

// Sets a global locale for a scope.
class GlobalLocale {
 public:
  explicit GlobalLocale(const std::locale& locale) : before_(std::locale::global(locale)) {}
  ~GlobalLocale() { std::locale::global(before_); }

 private:
  std::locale before_;
};

std::string printed(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", number);
  return text;
}

// A C locale with a decimal comma for a scope: an installed one, or one that localedef makes.
class CommaLocale {
 public:
  CommaLocale() {
    const auto is_comma = [] { return printed(0.5) == "0,50"; };
    for (const char* name : {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "nl_NL.UTF-8"}) {
      if (!found && std::setlocale(LC_ALL, name) != nullptr) {
        found = is_comma();
      }
    }
    const auto made = folder_.file("de_DE.UTF-8");
    if (!found &&
        std::system(("localedef -i de_DE -f UTF-8 " + made + " 2>/dev/null").c_str()) == 0) {
      setenv("LOCPATH", folder_.path().c_str(), 1);
      found = std::setlocale(LC_ALL, "de_DE.UTF-8") != nullptr && is_comma();
      unsetenv("LOCPATH");
    }
  }
  ~CommaLocale() { std::setlocale(LC_ALL, "C"); }

  bool found = false;

 private:
  testing::TemporaryFolder folder_;
};

}  // namespace

TEST_CASE("joined numbers do not depend on the program's locale") {
  const GlobalLocale grouping(std::locale(std::locale(), new testing::GroupingNumbers));
  std::ostringstream of_the_program;
  of_the_program << 1234567;
  REQUIRE(of_the_program.str() == "1.234.567");
  CHECK(ddp::concat(1234567, " ", 1234.5, " ", -8000L) == "1234567 1234.5 -8000");
  ddp::detail::TextStream text;
  text << 1234567;
  CHECK(text.str() == "1234567");
}

TEST_CASE("printf and strtod keep the decimal point in a scope of classic numbers") {
  const CommaLocale comma;
  if (!comma.found) {
    WARN("no locale with a decimal comma is installed, and localedef makes none");
    return;
  }
  CHECK(std::strtod("0.5", nullptr) == 0);
  {
    const ClassicNumbers numbers;
    CHECK(printed(1234.5) == "1234.50");
    CHECK(std::strtod("0.5", nullptr) == 0.5);
  }
  CHECK(printed(1234.5) == "1234,50");  // the program's choice again
}

TEST_CASE("control characters become escapes, and text in any language stays") {
  for (const std::string text : {"plain", "a\tb\nc\n", "Größe, 模型, модель, 🙂", ""}) {
    CHECK(printable(text) == text);
  }
  CHECK(printable("\x1b[31mred") == "\\x1b[31mred");
  CHECK(printable(std::string_view("\0\r\b\x7f", 4)) == "\\x00\\x0d\\x08\\x7f");
  CHECK(printable("\xc2\x9b"
                  "31m") == "\\xc2\\x9b31m");  // CSI as one character
  CHECK(printable("\xe2\x80\xae"
                  "gpj.exe") == "\\xe2\\x80\\xaegpj.exe");  // right to left
  CHECK(printable("\x9b"
                  "31m") == "\\x9b31m");         // no UTF-8
  CHECK(printable("\xe6\xa8") == "\\xe6\\xa8");  // cut
  CHECK(printable("\xc0\x9b\xed\xa0\x80\xf5") == "\\xc0\\x9b\\xed\\xa0\\x80\\xf5");
  CHECK(ddp::detail::printable_line("ö\tb\nc\x1b") == "ö\\x09b\\x0ac\\x1b");
}

TEST_CASE("a log line with another program's words does not control the terminal") {
  const auto text = testing::stderr_of([] {
    ddp::log_warning(
        "class \x1b]0;title\x07 of \x1b[2Jrank 3 said: \xc2\x9b"
        "2J");
  });
  CHECK(text.find("class \\x1b]0;title\\x07 of \\x1b[2Jrank 3 said: \\xc2\\x9b2J\n") !=
        std::string::npos);
  CHECK(text.find('\x1b') == std::string::npos);
}
