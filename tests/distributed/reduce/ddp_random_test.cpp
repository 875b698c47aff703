// SPDX-License-Identifier: Apache-2.0
// Random numbers behind wrapping: other ones on each rank, unless ddp.seed_ranks=false.
#include <set>

#include "distributed/ddp_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

std::string text_of(const torch::Tensor& tensor) {
  const auto on_host = tensor.detach().cpu().contiguous();
  return {static_cast<const char*>(on_host.const_data_ptr()), on_host.nbytes()};
}

/// The number of different values that the ranks have.
int num_different(const torch::Tensor& tensor) {
  const auto all = context().control_plane().all_gather(text_of(tensor));
  return static_cast<int>(std::set<std::string>(all.begin(), all.end()).size());
}

torch::Tensor dropout_mask() {
  return torch::dropout(torch::ones({256}, on_device()), 0.5, /*train=*/true);
}

}  // namespace

TEST_CASE("wrapping gives each rank its own dropout masks, and leaves the weights equal") {
  torch::manual_seed(7);
  torch::nn::Linear module(8, 8);
  module->to(context().device());
  REQUIRE(num_different(dropout_mask()) == 1);
  DistributedDataParallel model(module, group());
  REQUIRE(num_different(module->weight) == 1);
  REQUIRE(num_different(dropout_mask()) == world());
  REQUIRE(num_different(torch::rand({4})) == world());
}

TEST_CASE("ddp.seed_ranks=false leaves the ranks with equal numbers") {
  torch::manual_seed(7);
  torch::nn::Linear module(8, 8);
  module->to(context().device());
  DistributedDataParallel model(module, group(), {.seed_ranks = false});
  REQUIRE(num_different(dropout_mask()) == 1);
  REQUIRE(num_different(torch::rand({4})) == 1);
}

TEST_CASE("rank 0 draws as a process alone, so models made later begin alike on 1, 2 and 4 ranks") {
  torch::manual_seed(7);
  torch::nn::Linear plain(8, 8), plain_again(8, 8);
  torch::manual_seed(7);
  torch::nn::Linear module(8, 8);
  module->to(context().device());
  DistributedDataParallel model(module, group());
  torch::nn::Linear again(8, 8);
  again->to(context().device());
  DistributedDataParallel model_again(again, group());
  REQUIRE(torch::equal(module->weight.cpu(), plain->weight));
  REQUIRE(torch::equal(again->weight.cpu(), plain_again->weight));
}

TEST_CASE("each wrapping gives the ranks numbers that they had not drawn before") {
  torch::manual_seed(7);
  std::set<std::string> drawn;
  for (int i = 0; i < 3; ++i) {
    torch::nn::Linear module(8, 8);
    module->to(context().device());
    DistributedDataParallel model(module, group());
    for (const auto& text : context().control_plane().all_gather(text_of(dropout_mask()))) {
      drawn.insert(text);
    }
  }
  REQUIRE(static_cast<int>(drawn.size()) == 3 * world());
}
