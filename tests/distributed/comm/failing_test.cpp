// SPDX-License-Identifier: Apache-2.0
// A test fails on one rank while the others are in a collective: the run must end and fail.
#include <torch/torch.h>

#include "support/catch.hpp"
#include "support/multi_rank_main.hpp"

namespace ddp::test {

TEST_CASE("fails on rank 1 alone", "[multi_rank_main]") {
  auto& ctx = context();
  auto tensor = torch::ones({4});
  ctx.communicator()->all_reduce(tensor)->wait();
  REQUIRE(ctx.rank() != 1);
  ctx.communicator()->all_reduce(tensor)->wait();
}

TEST_CASE("is not reached", "[multi_rank_main]") {
  SUCCEED("ranks stop at the first failure");
}

}  // namespace ddp::test
