// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <iostream>

#include "support/multi_rank_main.hpp"

namespace ddp::test {

/// Prints a line and returns false if the test needs more ranks.
inline bool has_ranks(int wanted) {
  const int there = context().world_size();
  if (there < wanted) {
    std::cout << "SKIPPED: needs " << wanted << " ranks\n";
  }
  return there >= wanted;
}

}  // namespace ddp::test
