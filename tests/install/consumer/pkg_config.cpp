// SPDX-License-Identifier: Apache-2.0
// Without LibTorch's headers: compiles in a second, and still links and loads everything.
#include <iostream>

#include "ddp/core/launch_environment.hpp"

int main() {
  const auto none = [](const std::string&) { return std::optional<std::string>(); };
  const auto launch = ddp::detect_launch_environment({}, none);
  std::cout << ddp::to_string(launch.source) << "\n";
  return launch.world_size == 1 ? 0 : 1;
}
