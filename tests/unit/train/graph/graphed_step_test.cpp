// SPDX-License-Identifier: Apache-2.0
// GraphedStep without captures: the step runs like the plain lambda.
#include <torch/torch.h>

#include <map>

#include "ddp/data/dataset.hpp"
#include "ddp/detail/module_tensors.hpp"
#include "ddp/detail/visit_tensors.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/train/graphed_step.hpp"
#include "support/catch.hpp"
#include "train/graph/graph_pool.hpp"

namespace {

using namespace ddp;

Context make_context() {
  ContextOptions options;
  options.device = DeviceChoice::Cpu;
  return Context::create(options);
}

struct Outputs {
  at::Tensor loss;
  std::map<std::string, at::Tensor> others;
  int64_t num_samples = 0;
};
void for_each_tensor(Outputs& outputs, const TensorVisitor& visit) {
  visit(outputs.loss);
  for (auto& [name, tensor] : outputs.others) {
    visit(tensor);
  }
}

struct CountedBatch {
  at::Tensor ids;
  int64_t num_targets = 0;
};
void for_each_tensor(CountedBatch& batch, const TensorVisitor& visit) {
  visit(batch.ids);
  visit(batch.num_targets);
}

Batch batch_of(int64_t step) {
  torch::manual_seed(static_cast<uint64_t>(100 + step));
  return {torch::randn({4, 3}), torch::randint(0, 2, {4})};
}

struct Trained {
  torch::nn::Linear module{3, 2};
  std::vector<double> losses;
};

}  // namespace

TEST_CASE("on the CPU a step runs its lambda with the host's numbers") {
  auto ctx = make_context();
  const auto train = [&](bool graphed) {
    torch::manual_seed(1);
    Trained trained;
    DistributedDataParallel model(trained.module, ctx.communicator());
    auto optimizer = make_optimizer(model, {.momentum = 0.9});
    const auto lambda = [&](const Batch& batch, const StepScalars& scalars) {
      model.zero_grad();
      auto loss = torch::cross_entropy_loss(model.forward(batch.data), batch.target);
      loss.backward();
      optimizer->step(scalars);
      return std::vector{loss};
    };
    GraphedStep step(ctx, {.models = {&model}, .optimizers = {optimizer.get()}}, lambda);
    for (int64_t i = 0; i < 5; ++i) {
      const double lr = 0.1 / static_cast<double>(i + 1);
      if (graphed) {
        const auto result = step(batch_of(i), {.lr = lr, .step = i});
        REQUIRE(result.log.is_ready());
        REQUIRE_FALSE(result.outputs[0].requires_grad());
        trained.losses.push_back(result.log[0]);
      } else {
        trained.losses.push_back(
            lambda(batch_of(i), {.lr = lr, .step = static_cast<double>(i)})[0].item<double>());
      }
    }
    if (graphed) {
      REQUIRE(step.counts().eager == 5);
      REQUIRE(step.counts().replayed == 0);
      REQUIRE(step.counts().why_eager.empty());
    }
    return trained;
  };
  const auto plain = train(false);
  const auto graphed = train(true);
  REQUIRE(plain.losses == graphed.losses);
  REQUIRE(torch::equal(plain.module->weight, graphed.module->weight));
  REQUIRE(plain.losses.front() != plain.losses.back());
}

TEST_CASE("a step's log holds the outputs of one element in order") {
  auto ctx = make_context();
  GraphedStep step(ctx, {}, [](const std::vector<Batch>& batches, const StepScalars& scalars) {
    return Outputs{.loss = batches[0].data.sum() + batches[1].data.sum(),
                   .others = {{"all", batches[0].data},
                              {"correct", torch::tensor(int64_t{7})},
                              {"lr", scalars.lr.tensor(at::kCPU)},
                              {"step", scalars.step.tensor(at::kCPU).reshape({1, 1})}},
                   .num_samples = 2};
  });
  const auto ones = Batch{torch::ones({2, 3}), torch::zeros({2})};
  const auto result = step({ones, ones}, {.lr = 0.5, .step = 9});
  REQUIRE(result.outputs.num_samples == 2);
  REQUIRE(result.log.size() == 4);
  CHECK(result.log[0] == 12);
  CHECK(result.log[1] == 7);
  CHECK(result.log[2] == 0.5);
  CHECK(result.log[3] == 9);
  CHECK_THROWS_AS(result.log[4], SettingsError);
  CHECK_THROWS_AS(result.log[-1], SettingsError);
}

TEST_CASE("a step's log gives the numbers by the names of its outputs too") {
  auto ctx = make_context();
  GraphedStep step(ctx, {}, [](const Batch& batch, const StepScalars& scalars) {
    return Outputs{
        .loss = batch.data.sum(),
        .others = {
            {"all", batch.data}, {"lr", scalars.lr.tensor(at::kCPU)}, {"none", at::Tensor()}}};
  });
  const auto result = step({torch::ones({2, 3}), torch::zeros({2})}, {.lr = 0.5});
  const auto& others = result.outputs.others;
  CHECK(result.logged(result.outputs.loss) == 6);
  CHECK(result.logged(others.at("lr")) == 0.5);
  CHECK_FALSE(result.logged(others.at("none")).has_value());
  CHECK_THROWS_AS(result.logged(others.at("none")).value(), SettingsError);
  CHECK_THROWS_AS(result.logged(others.at("all")), SettingsError);
  CHECK_THROWS_AS(result.logged(torch::ones({})), SettingsError);
}

TEST_CASE("outputs are detached, views too, and outputs that the lambda keeps stay unchanged") {
  auto ctx = make_context();
  const auto weight = torch::ones({3, 1}, torch::kFloat).requires_grad_();
  std::vector<at::Tensor> kept;
  GraphedStep step(ctx, {}, [&](const Batch& batch, const StepScalars&) {
    const auto loss = batch.data.mm(weight).sum(0);  // [1]
    kept = {loss.squeeze(), loss.select(0, 0), loss.view(std::vector<int64_t>{}), loss, weight};
    return kept;
  });
  const auto result = step(batch_of(0), {});
  for (size_t i = 0; i < 4; ++i) {
    CAPTURE(i);
    REQUIRE_FALSE(result.outputs[i].requires_grad());
    REQUIRE(kept[i].requires_grad());
    REQUIRE(result.log[static_cast<int>(i)] == kept[0].item<double>());
  }
  REQUIRE(result.outputs[4].requires_grad());  // a leaf has no graph
  kept[1].backward();
  REQUIRE(torch::equal(weight.grad().flatten(), batch_of(0).data.sum(0)));
}

TEST_CASE("numbers and texts of a batch distinguish kinds of batches") {
  const auto numbers_of = [](const auto& batch) {
    std::vector<int64_t> numbers;
    const TensorVisitor visit([](at::Tensor&) {},
                              [&](int64_t number) { numbers.push_back(number); });
    REQUIRE(ddp::detail::visit_tensors(batch, visit));
    return numbers;
  };
  const at::Tensor tensor;
  REQUIRE(numbers_of(Batch{}).empty());
  REQUIRE(numbers_of(std::tuple(tensor, int64_t{3}, true)) == std::vector<int64_t>{3, 1});
  REQUIRE(numbers_of(std::pair(0.5, tensor)) != numbers_of(std::pair(0.25, tensor)));
  REQUIRE(numbers_of(std::pair(std::string("a"), tensor)) !=
          numbers_of(std::pair(std::string("b"), tensor)));
  REQUIRE(numbers_of(std::vector<std::vector<int>>{{1}, {}}) !=
          numbers_of(std::vector<std::vector<int>>{{}, {1}}));
  CountedBatch counted;
  const auto before = numbers_of(std::vector{counted});
  counted.num_targets = 5;
  REQUIRE(numbers_of(std::vector{counted}) != before);
}

TEST_CASE("the modes of submodules are distinguished") {
  torch::nn::Sequential module(torch::nn::Linear(2, 2), torch::nn::BatchNorm1d(2));
  auto ctx = make_context();
  DistributedDataParallel model(module, ctx.communicator());
  const auto all = ddp::detail::mode_key(ddp::detail::all_tensors(model));
  module[1]->eval();
  REQUIRE(model.is_training());
  REQUIRE(ddp::detail::mode_key(ddp::detail::all_tensors(model)) != all);
  module[1]->train();
  REQUIRE(ddp::detail::mode_key(ddp::detail::all_tensors(model)) == all);
  REQUIRE(model.require_backward_grad_sync());
  const auto no_sync = model.no_sync();
  REQUIRE_FALSE(model.require_backward_grad_sync());
}

TEST_CASE("invalid options are refused by name") {
  auto ctx = make_context();
  const auto step_of = [](const Batch& batch, const StepScalars&) { return batch.data.sum(); };
  CHECK_THROWS_WITH(GraphedStep(ctx, {}, step_of, GraphedStepOptions{.warmup_steps = 0}),
                    Catch::Contains("warmup_steps is 0"));
  CHECK_THROWS_WITH(GraphedStep(ctx, {}, step_of, GraphedStepOptions{.max_graphs = 0}),
                    Catch::Contains("max_graphs is 0"));
  CHECK_THROWS_WITH(GraphedStep(ctx, {}, step_of, GraphedStepOptions{.mode = CudaGraph::On}),
                    Catch::Contains("train.cuda_graph=on") && Catch::Contains("cpu"));
  GraphedStep many(ctx, {}, [](const Batch&, const StepScalars&) {
    return std::vector<at::Tensor>(17, torch::zeros({}));
  });
  CHECK_THROWS_WITH(many(batch_of(0), {}), Catch::Contains("17 tensors of one element"));
}

#ifdef DDP_HAS_CUDA
TEST_CASE("graphs share a pool while one of them exists; later ones get another") {
  GraphPool pool;
  auto first = pool.id();
  const auto id = *first;
  CHECK(pool.id() == first);
  first.reset();
  CHECK(*pool.id() != id);
  CHECK(*GraphPool().id() != *pool.id());
}
#endif
