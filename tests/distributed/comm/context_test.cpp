// SPDX-License-Identifier: Apache-2.0
// A context of several ranks: ranks and nodes, device, seeds, collectives on both planes.
#include "ddp/comm/context.hpp"

#include <torch/torch.h>

#include <set>

#include "support/catch.hpp"
#include "support/multi_rank_main.hpp"

namespace ddp::test {
namespace {

TEST_CASE("context: every rank has its place", "[context]") {
  auto& ctx = context();
  std::set<std::string> ranks;
  for (const auto& rank : ctx.control_plane().all_gather(std::to_string(ctx.rank()))) {
    ranks.insert(rank);
  }
  REQUIRE(static_cast<int>(ranks.size()) == ctx.world_size());
  REQUIRE(ctx.local_rank() == ctx.rank());  // tests run on one host
  REQUIRE(ctx.local_world_size() == ctx.world_size());
  REQUIRE(ctx.num_nodes() == 1);
  REQUIRE(ctx.node_rank() == 0);
  REQUIRE(ctx.communicator()->rank() == ctx.rank());
  REQUIRE(ctx.communicator()->world_size() == ctx.world_size());
  REQUIRE(ctx.communicator()->device() == ctx.device());
}

TEST_CASE("context: the communicator sums over ranks", "[context]") {
  auto& ctx = context();
  auto ones = torch::full({1000}, ctx.rank() + 1, ctx.device());
  ctx.communicator()->all_reduce(ones)->wait();
  const int64_t sum = ctx.world_size() * (ctx.world_size() + 1) / 2;
  REQUIRE(ones.eq(sum).all().item<bool>());
}

TEST_CASE("context: a large value travels over the control plane", "[context]") {
  auto& ctx = context();
  const std::string value(300'000, static_cast<char>('a' + ctx.rank()));
  const auto values = ctx.control_plane().all_gather(value);
  REQUIRE(values.back() == std::string(300'000, static_cast<char>('a' + ctx.world_size() - 1)));
}

}  // namespace
}  // namespace ddp::test
