// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <iostream>

#include "support/multi_rank_main.hpp"

namespace ddp::test {

/// Says so where a test cannot run with so few.
inline bool has_ranks(int wanted) {
  const int there = context().world_size();
  if (there < wanted) {
    std::cout << "SKIPPED: needs " << wanted << " ranks\n";
  }
  return there >= wanted;
}

}  // namespace ddp::test
