// SPDX-License-Identifier: Apache-2.0
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
#endif

#include "support/grouping_locale.hpp"

int main(int argc, char** argv) {
  testing::set_test_locale();
  return Catch::Session().run(argc, argv);
}
