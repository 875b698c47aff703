// SPDX-License-Identifier: Apache-2.0
// The locale of a program that shows numbers to people, as std::locale("de_DE.UTF-8").
#pragma once

#include <cstdlib>
#include <locale>
#include <string>

namespace testing {

/// 1234567.5 is "1.234.567,5". Needs no locale of the system.
struct GroupingNumbers : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

/// Sets that locale for the whole process if the environment has DDP_TEST_LOCALE=grouping, with
/// which ddp_add_test(… UNDER_LOCALE) starts a test a second time.
inline void set_test_locale() {
  const char* chosen = std::getenv("DDP_TEST_LOCALE");
  if (chosen != nullptr && std::string(chosen) == "grouping") {
    std::locale::global(std::locale(std::locale(), new GroupingNumbers));
  }
}

}  // namespace testing
