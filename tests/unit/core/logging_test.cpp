// SPDX-License-Identifier: Apache-2.0
#include "ddp/core/logging.hpp"

#include <cstdlib>

#include "support/catch.hpp"

using ddp::is_logged;
using ddp::LogLevel;

TEST_CASE("a line is logged from the chosen level on") {
  unsetenv("DDP_LOG_LEVEL");  // it would override the chosen level
  ddp::set_log_level(LogLevel::Warning);
  CHECK_FALSE(is_logged(LogLevel::Info));
  CHECK(is_logged(LogLevel::Warning));
  CHECK(is_logged(LogLevel::Error));
  ddp::set_log_level(LogLevel::Info);
  CHECK_FALSE(is_logged(LogLevel::Debug));
  CHECK(is_logged(LogLevel::Info));
}
