// SPDX-License-Identifier: Apache-2.0
// Collectives with gradients in CUDA graphs: forward and backward are captured, and replays follow
// their inputs.
#include "ddp/comm/functional.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/train/graphed_step.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "gpu/capture.hpp"

using namespace ddp;
using namespace ddp::test;
using torch::Tensor;

namespace {

std::vector<int64_t> same_for_all(int64_t size) {
  return std::vector<int64_t>(static_cast<size_t>(world()), size);
}

// One result of each function, with equal parts and with sizes.
Tensor sum_of_all(const Tensor& x) {
  const auto sizes = same_for_all(x.size(0)), parts = same_for_all(x.size(0) / world());
  return all_gather_with_grad(x, group()).square().sum() +
         all_gather_with_grad(x, group(), sizes).square().sum() +
         all_reduce_with_grad(x, group(), ReduceOp::Avg).square().sum() +
         reduce_scatter_with_grad(x, group()).square().sum() +
         all_to_all_with_grad(x, group()).square().sum() +
         all_to_all_with_grad(x, group(), parts, parts).square().sum();
}

Tensor input_of_step(int64_t step) {
  return integers({4, 3}, 100 * (step + 1) + rank());
}

}  // namespace

TEST_CASE("forward and backward of every function are captured") {
  auto x = input_of_step(0).requires_grad_();
  const auto step = [&] {
    x.mutable_grad().reset();
    sum_of_all(x).backward();
  };
  at::cuda::CUDAGraph graph;
  warm_up_and_capture(graph, step);
  const auto captured = x.grad();  // the graph writes it
  for (int replay = 1; replay < 5; ++replay) {
    const auto input = input_of_step(replay);
    {
      const torch::NoGradGuard no_grad;
      x.copy_(input);
    }
    graph.replay();
    auto eager = input.clone().requires_grad_();
    sum_of_all(eager).backward();
    REQUIRE(captured.equal(eager.grad()));
  }
}

TEST_CASE(
    "gather, scatter, reduce and all_to_all of a communicator are captured, also in a group") {
  const auto comm = group();
  auto mine = torch::zeros({4, 3}, on_device());
  auto gathered = torch::zeros({4 * world(), 3}, on_device());
  auto scattered = torch::zeros({4, 3}, on_device());
  auto exchanged = torch::zeros({4, 3}, on_device());
  auto reduced = torch::zeros({4, 3}, on_device());
  auto shorts = torch::zeros({5}, on_device().dtype(torch::kShort));
  const auto step = [&] {
    reduced.copy_(mine);
    shorts.fill_(rank() + 1);
    std::vector<WorkPtr> works;
    {
      const GroupScope scope(*comm);
      works.push_back(comm->gather(gathered, mine, 0));
      works.push_back(comm->all_to_all(exchanged, mine));
      works.push_back(comm->reduce(reduced, 0, ReduceOp::Sum));
    }
    for (const auto& work : works) {
      work->wait();
    }
    comm->scatter(scattered, gathered, 0)->wait();
    comm->reduce(shorts, 0)->wait();
  };
  at::cuda::CUDAGraph graph;
  warm_up_and_capture(graph, step);
  for (int replay = 0; replay < 3; ++replay) {
    mine.copy_(input_of_step(replay));
    graph.replay();
    std::vector<Tensor> all;
    auto sum = torch::zeros_like(mine);
    for (int r = 0; r < world(); ++r) {
      all.push_back(integers({4, 3}, 100 * (replay + 1) + r));
      sum += all.back();
    }
    std::vector<Tensor> received;
    for (const auto& of_rank : all) {
      received.push_back(of_rank.chunk(world())[static_cast<size_t>(rank())]);
    }
    REQUIRE(scattered.equal(mine));
    REQUIRE(exchanged.equal(torch::cat(received)));
    REQUIRE(reduced.equal(rank() == 0 ? sum : mine));
    const int total = world() * (world() + 1) / 2;
    REQUIRE(shorts.eq(rank() == 0 ? total : rank() + 1).all().item<bool>());
    if (rank() == 0) {
      REQUIRE(gathered.equal(torch::cat(all)));
    }
  }
}

TEST_CASE("a GraphedStep with a contrastive loss trains like an eager one") {
  const auto train = [](CudaGraph mode) {
    Mlp module;
    DistributedDataParallel<Mlp> model(module, group(), with_cap(1.0 / (1 << 20)));
    OptimizerOptions rule;
    rule.type = OptimizerType::Sgd;
    const auto optimizer = make_optimizer(model, rule);
    GraphedStep step(
        context(), {.models = {&model}, .optimizers = {optimizer.get()}},
        [&](const Tensor& batch, const StepScalars& scalars) {
          model.zero_grad();
          const auto own = model.forward(batch);
          const auto loss = own.mm(all_gather_with_grad(own, group()).t()).mean();
          loss.backward();
          optimizer->step(scalars);
          return loss.detach();
        },
        GraphedStepOptions{.mode = mode});
    for (int64_t i = 0; i < 20; ++i) {
      step(batch_of(rank(), i, 4), {.lr = 1.0 / (1 << 20), .step = i});
    }
    std::vector<Tensor> weights;
    for (const auto& weight : module->parameters()) {
      weights.push_back(weight.detach().clone());
    }
    CHECK((mode == CudaGraph::Off) == (step.counts().replayed == 0));
    return weights;
  };
  require_equal(train(CudaGraph::Auto), train(CudaGraph::Off));
}
