// SPDX-License-Identifier: Apache-2.0
#include "support/partly_used_ops.hpp"

TEST_CASE("inputs of ops have gradients where ATen's have them, whichever results a loss uses") {
  ddp::test::check_partly_used_ops(at::kCPU);
}
