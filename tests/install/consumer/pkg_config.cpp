// SPDX-License-Identifier: Apache-2.0
// Without LibTorch's headers: compiles in a second, and still links and loads everything.
#include "ddp/core/logging.hpp"

int main() {
  ddp::log_info("hello");
  return ddp::is_logged(ddp::LogLevel::Error) ? 0 : 1;
}
