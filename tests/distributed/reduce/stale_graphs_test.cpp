// SPDX-License-Identifier: Apache-2.0
// A new bucket layout, which only several ranks get, and the graphs that depend on it.
#include "distributed/ddp_test_utils.hpp"
#include "reduce/reducer.hpp"
#include "train/graph/step_cache.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

struct NoGraph final : ddp::detail::StepGraph {
  bool has_backward() const override { return false; }
  bool gradients_match() const override { return true; }
  int64_t num_nodes() const override { return 1; }
  ddp::detail::StepDone replay(ddp::detail::StepCall&, uint64_t) override { return {}; }
};

}  // namespace

TEST_CASE("a new bucket layout drops the graphs of training steps and keeps those of evaluations") {
  Mlp module;
  DistributedDataParallel model(module, group(), with_cap(1e-6));
  const GraphedParts parts{.models = {&model}};
  ddp::detail::StepCache cache(parts, {}, context().device(), /*is_main=*/true);
  const auto find = [&] {
    return cache.find({.numbers = {}, .inputs = {}, .host_numbers = {}, .run = {}});
  };
  const auto has_evaluation = [&] {
    const torch::NoGradGuard no_grad;
    return find()->graph != nullptr;
  };
  cache.drop_stale();
  cache.add_graph(*find(), std::make_unique<NoGraph>());
  {
    const torch::NoGradGuard no_grad;
    cache.add_graph(*find(), std::make_unique<NoGraph>());
  }
  const auto version = [&] { return model.reducer().gradients().layout().version; };
  const auto first_version = version();
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    model.forward(batch_of(rank(), step, 4)).sum().backward();
    cache.drop_stale();
    CAPTURE(step);
    CHECK((find()->graph != nullptr) == (version() == first_version));
    CHECK(has_evaluation());
  }
  CHECK(version() != first_version);
  CHECK(cache.num_graphs() == 1);
}
