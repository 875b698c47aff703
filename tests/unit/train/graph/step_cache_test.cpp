// SPDX-License-Identifier: Apache-2.0
// The cache of a GraphedStep's graphs: which calls share one, which become stale, which are
// evicted.
#include <torch/torch.h>

#include "ddp/amp/amp.hpp"
#include "ddp/detail/model_weights.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/reduce/join.hpp"
#include "support/catch.hpp"
#include "train/graph/step_cache.hpp"

namespace {

using namespace ddp;
using namespace ddp::detail;

struct FakeGraph final : StepGraph {
  explicit FakeGraph(bool has) : backward(has) {}
  bool has_backward() const override { return backward; }
  bool gradients_match() const override { return true; }
  int64_t num_nodes() const override { return 1; }
  StepDone replay(StepCall&, uint64_t) override { return {}; }
  const bool backward;
};

Context make_cpu_context() {
  ContextOptions options;
  options.device = DeviceChoice::Cpu;
  return Context::create(options);
}

/// Finds the kinds of batches of one tensor.
struct Cache {
  explicit Cache(const GraphedParts& used = {}, int64_t max_graphs = 8)
      : parts(used), cache(parts, {.max_graphs = max_graphs}, at::kCPU, /*is_main=*/true) {}

  StepCache::Kind* find(at::Tensor input, int64_t number = 0) {
    return cache.find({.numbers = {}, .inputs = {&input}, .host_numbers = {number}, .run = {}});
  }
  StepCache::Kind* find(int64_t size) { return find(torch::empty({size})); }
  void add_graph(int64_t size, bool backward = false) {
    cache.add_graph(*find(size), std::make_unique<FakeGraph>(backward));
  }
  bool has_graph(int64_t size) {
    const auto* kind = find(size);
    return kind != nullptr && kind->graph != nullptr;
  }

  const GraphedParts parts;
  StepCache cache;
};

struct Trainable {
  torch::nn::Sequential module{torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2)};
  Context context = make_cpu_context();
  DistributedDataParallel<torch::nn::Sequential> model{module, context.communicator()};
  std::unique_ptr<Optimizer> optimizer = make_optimizer(model, {.momentum = 0.9});
  GradScaler scaler{AmpOptions{.dtype = AmpDtype::Fp16}};

  GraphedParts parts() {
    return {.models = {&model}, .optimizers = {optimizer.get()}, .scaler = &scaler};
  }
};

}  // namespace

TEST_CASE("calls share a graph if their layouts, numbers and modes are equal") {
  Trainable trained;
  Cache cache(trained.parts());
  const auto input = torch::empty({4, 3});
  cache.find(input)->eager_steps = 1;
  const auto is_known = [&](StepCache::Kind* kind) { return kind->eager_steps == 1; };
  CHECK(is_known(cache.find(torch::empty({4, 3}))));
  CHECK_FALSE(is_known(cache.find(torch::empty({3, 4}))));
  CHECK_FALSE(is_known(cache.find(torch::empty({3, 4}).t())));
  CHECK_FALSE(is_known(cache.find(torch::empty({4, 3}, torch::kHalf))));
  CHECK_FALSE(is_known(cache.find(torch::empty({4, 3}, torch::requires_grad()))));
  CHECK_FALSE(is_known(cache.find(at::Tensor())));
  CHECK_FALSE(is_known(cache.find(input, /*number=*/5)));
  {
    const torch::NoGradGuard no_grad;
    CHECK_FALSE(is_known(cache.find(input)));
    CHECK_FALSE(cache.find(input)->trains);
  }
  CHECK(cache.find(input)->trains);
  {
    const auto no_sync = trained.model.no_sync();
    CHECK_FALSE(is_known(cache.find(input)));
  }
  trained.module[1]->eval();
  CHECK_FALSE(is_known(cache.find(input)));
  trained.module[1]->train();
  CHECK(is_known(cache.find(input)));
}

TEST_CASE("a model that computes otherwise drops all graphs, also of steps without parts") {
  Trainable trained;
  for (const auto& parts : {GraphedParts{}, trained.parts()}) {
    Cache cache(parts);
    cache.cache.drop_stale();
    cache.add_graph(1);
    cache.add_graph(2, /*backward=*/true);
    cache.cache.drop_stale();
    CHECK(cache.cache.num_graphs() == 2);
    ops::invalidate_graphs();
    cache.cache.drop_stale();
    CHECK(cache.cache.num_graphs() == 0);
  }
}

TEST_CASE("kinds of batches that occur once displace no graph") {
  Cache cache({}, /*max_graphs=*/2);
  for (int64_t size = 1; size <= 300; ++size) {  // more than the cache remembers
    cache.find(size)->eager_steps = 1;
  }
  CHECK(cache.find(300)->eager_steps == 1);
  CHECK(cache.find(20)->eager_steps == 0);  // evicted
  cache.add_graph(800);
  cache.add_graph(900);
  CHECK(cache.cache.num_graphs() == 2);
  CHECK(cache.find(1000) == nullptr);
  CHECK(cache.find(300) == nullptr);
  CHECK(cache.has_graph(800));
  CHECK(cache.has_graph(900));
  cache.cache.clear();
  CHECK(cache.cache.num_graphs() == 0);
  CHECK_FALSE(cache.has_graph(800));
}

TEST_CASE("a recurring kind of batch is remembered among many that occur once") {
  Cache cache({}, /*max_graphs=*/2);
  for (int64_t i = 0; i < 500; ++i) {
    if (i % 100 == 0) {
      CHECK(cache.find(1)->eager_steps++ == i / 100);
    }
    cache.find(2 + i);
  }
}

TEST_CASE("a cycle of more kinds than max_graphs is remembered") {
  Cache cache({}, /*max_graphs=*/2);
  for (int64_t i = 0; i < 10; ++i) {
    CHECK(cache.find(1 + i % 5)->eager_steps++ == i / 5);
  }
}

TEST_CASE("graphs become stale when the state that is baked into them changes") {
  Trainable trained;
  Cache cache(trained.parts());
  cache.cache.drop_stale();
  const auto is_stale_after = [&](const std::function<void()>& change) {
    cache.find(4)->eager_steps = 2;
    cache.find(4)->has_block = true;
    cache.add_graph(4);
    cache.cache.drop_stale();
    REQUIRE(cache.has_graph(4));
    change();
    cache.cache.drop_stale();
    const auto* kind = cache.find(4);
    const bool is_stale = kind->graph == nullptr;
    CHECK(kind->all_steps() >= 2);  // one-time searches stay done
    CHECK(kind->eager_steps == (is_stale ? 0 : 2));
    CHECK(kind->has_block != is_stale);
    cache.cache.clear();
    return is_stale;
  };
  auto& weight = trained.module[0]->as<torch::nn::Linear>()->weight;
  CHECK_FALSE(is_stale_after([&] { weight.detach().mul_(2); }));
  CHECK(is_stale_after([&] { weight.set_data(weight.detach().clone()); }));
  CHECK(is_stale_after([&] { weight.set_requires_grad(false); }));
  CHECK(is_stale_after([&] { weight.set_data(weight.detach().clone()); }));  // frozen
  CHECK_FALSE(is_stale_after([&] { trained.model.sync_module_states(); }));
  CHECK_FALSE(is_stale_after([&] { join(trained.model, [] {}); }));
  CHECK(is_stale_after([&] { trained.scaler.set_growth_factor(4.0); }));
  CHECK(is_stale_after([&] { trained.scaler.set_backoff_factor(0.25); }));
  CHECK(is_stale_after([&] { trained.scaler.set_growth_interval(7); }));
  CHECK(
      is_stale_after([&] { trained.optimizer->load_state_dict(trained.optimizer->state_dict()); }));
  CHECK(is_stale_after([&] { weight.set_data(weight.detach().view(torch::kInt)); }));
  CHECK(is_stale_after([&] {
    weight.set_data(weight.detach().as_strided(weight.sizes(), {1, weight.size(0)}));
  }));
}

TEST_CASE("changed parts drop the graphs of all kinds, and their number is counted") {
  Trainable trained;
  Cache cache(trained.parts());
  cache.cache.drop_stale_parts();
  cache.add_graph(1, /*backward=*/true);
  cache.add_graph(2);
  CHECK(cache.cache.num_graphs() == 2);
  trained.scaler.set_growth_interval(9);
  cache.cache.drop_stale_parts();
  CHECK(cache.cache.num_graphs() == 0);
  CHECK_FALSE(cache.has_graph(1));
  CHECK_FALSE(cache.has_graph(2));
}

TEST_CASE("a captured backward makes its kind depend on the bucket layout") {
  Cache cache;
  const torch::NoGradGuard no_grad;
  cache.add_graph(1, /*backward=*/true);
  cache.add_graph(2, /*backward=*/false);
  CHECK(cache.find(1)->trains);
  CHECK_FALSE(cache.find(2)->trains);
}
