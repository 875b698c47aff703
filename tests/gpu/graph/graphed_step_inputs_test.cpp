// SPDX-License-Identifier: Apache-2.0
// Inputs and modes of a step: replays see the same values as eager steps.
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <tuple>

#include "gpu/graph/graphed_step_test.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

at::Tensor counted(std::vector<int64_t> sizes, int64_t from) {
  int64_t numel = 1;
  for (const auto size : sizes) {
    numel *= size;
  }
  return torch::arange(from, from + numel, on_device().dtype(torch::kFloat)).view(sizes);
}

/// A sum that depends on each element's position.
at::Tensor checksum(const at::Tensor& tensor) {
  const auto flat = tensor.to(torch::kDouble).flatten();
  return flat.dot(torch::arange(1, flat.numel() + 1, flat.options()));
}

constexpr int kFewSteps = 8;  // three of warm-up, then replays

}  // namespace

TEST_CASE("inputs that are slices, expanded or turned give in replays what they give eagerly") {
  GraphedStep step(
      context(), {},
      [](const std::vector<at::Tensor>& batch, const StepScalars&) {
        std::vector<at::Tensor> sums;
        for (const auto& tensor : batch) {
          sums.push_back(checksum(tensor));
        }
        return sums;
      },
      GraphedStepOptions{.mode = CudaGraph::On});
  for (int i = 0; i < kFewSteps; ++i) {
    const auto tokens = counted({4, 9}, 100 * i);
    const std::vector<at::Tensor> batch{
        tokens.narrow(1, 0, 8),
        tokens.narrow(1, 1, 8),
        counted({4, 1}, i).expand({4, 1000}),
        tokens.t(),
        tokens.narrow(0, 1, 2),
        counted({2, 3, 4, 4}, i).contiguous(at::MemoryFormat::ChannelsLast)};
    const auto log = step(batch, {.step = i}).log;
    for (size_t k = 0; k < batch.size(); ++k) {
      CAPTURE(i, k);
      REQUIRE(log[static_cast<int>(k)] == checksum(batch[k]).item<double>());
    }
  }
  REQUIRE(step.counts().replayed == kFewSteps - 3);
}

TEST_CASE("steps that threw leave nothing that later ones wait for") {
  for (const auto mode : {CudaGraph::Off, CudaGraph::On}) {
    bool throws = false;
    GraphedStep step(
        context(), {},
        [&](const at::Tensor& batch, const StepScalars&) {
          if (throws) {
            throw std::runtime_error("a bad batch");
          }
          return batch.sum();
        },
        GraphedStepOptions{.mode = mode});
    constexpr int kCalls = 2 * StepLog::kMaxStepsAhead + 40;
    double last = 0;
    for (int i = 0; i < kCalls; ++i) {
      const auto data = torch::full({8}, static_cast<float>(i), on_device());
      throws = i == 1 || i == 2;
      if (throws) {
        REQUIRE_THROWS_WITH(step(data, {.step = i}), Catch::Contains("a bad batch"));
      } else if (i == 9) {  // fails before the lambda: a dense copy needs 64 TiB
        const auto huge = torch::ones({1}, on_device()).expand({int64_t{1} << 44});
        REQUIRE_THROWS_AS(step(huge, {.step = i}), c10::OutOfMemoryError);
      } else {
        last = step(data, {.step = i}).log[0];
      }
    }
    REQUIRE(last == 8 * (kCalls - 1));
    // Calls that threw do not count as warm-up; three others do.
    REQUIRE(step.counts().replayed == (mode == CudaGraph::On ? kCalls - 6 : 0));
  }
}

TEST_CASE("a capture that fails on one rank alone is undone there, gradients set before the step") {
  // zero_grad() precedes the step, so a failed capture's values in .grad would be added to.
  const auto train_outside = [](bool fails, CudaGraph mode) {
    torch::manual_seed(3);
    Mlp module;
    DistributedDataParallel model(module, group(), with_cap(1.0 / (1 << 20)));
    auto optimizer = make_optimizer(model, {.momentum = 0.9});
    GraphedStep step(
        context(), {.models = {&model}, .optimizers = {optimizer.get()}},
        [&](const at::Tensor& batch, const StepScalars& scalars) {
          auto loss = model.forward(batch).square().mean();
          loss.backward();
          optimizer->step(scalars);
          if (fails && rank() == world() - 1 && capturing()) {
            throw std::runtime_error("only here");
          }
          return loss;
        },
        GraphedStepOptions{.mode = mode});
    std::vector<double> losses;
    for (int i = 0; i < 12; ++i) {
      model.zero_grad();
      losses.push_back(step(batch_of(rank(), i, 4), {.lr = 0.01, .step = i}).log[0]);
    }
    if (fails && rank() == world() - 1) {
      REQUIRE_THAT(step.counts().why_eager, Catch::Contains("only here"));
    } else {
      REQUIRE((step.counts().replayed > 0) == (mode != CudaGraph::Off));
    }
    std::vector<at::Tensor> tensors = grads_of(*module);
    for (const auto& parameter : module->parameters()) {
      tensors.push_back(parameter.detach().clone());
    }
    return std::pair(losses, tensors);
  };
  const auto eager = train_outside(false, CudaGraph::Off);
  const auto failed = train_outside(true, CudaGraph::Auto);
  REQUIRE(failed.first == eager.first);
  require_equal(failed.second, eager.second);
  if (has_ranks(2)) {
    std::cout << "one rank's failing capture was undone, " << world() - 1 << " replayed\n";
  }
}

TEST_CASE("small float tensors of the CPU are on the device in each step, others only eagerly") {
  const auto run = [](CudaGraph mode, bool with_index) {
    GraphedStep step(
        context(), {},
        [&](const std::vector<at::Tensor>& batch, const StepScalars&) {
          REQUIRE(batch[1].is_cuda());
          REQUIRE((batch.size() < 3 || batch[2].is_cpu()));
          return (batch[0] * batch[1][0] + batch[1][1]).sum();
        },
        GraphedStepOptions{.mode = mode});
    for (int i = 0; i < kFewSteps; ++i) {
      std::vector<at::Tensor> batch{torch::full({4}, 2.0F, on_device()),
                                    torch::tensor({0.5F * static_cast<float>(i), 1.0F})};
      if (with_index) {
        batch.push_back(torch::tensor({int64_t{7}}));
      }
      const double sum = step(batch, {.step = i}).log[0];  // may throw
      REQUIRE(sum == 4.0 * i + 4.0);
    }
    return step.counts();
  };
  REQUIRE(run(CudaGraph::On, false).replayed == kFewSteps - 3);
  REQUIRE(run(CudaGraph::Off, false).eager == kFewSteps);
  REQUIRE(run(CudaGraph::Off, true).eager == kFewSteps);
  const auto fallen_back = run(CudaGraph::Auto, true);
  REQUIRE(fallen_back.eager == kFewSteps);
  REQUIRE_THAT(fallen_back.why_eager, Catch::Contains("CPU tensor of 1 Long"));
  REQUIRE_THROWS_WITH(run(CudaGraph::On, true),
                      Catch::Contains("train.cuda_graph=on") && Catch::Contains("from the CPU"));
}

TEST_CASE("numbers in a batch have graphs of their own") {
  GraphedStep step(
      context(), {},
      [](const std::tuple<at::Tensor, int64_t>& batch, const StepScalars&) {
        return std::get<0>(batch).sum() * std::get<1>(batch);
      },
      GraphedStepOptions{.mode = CudaGraph::On, .max_graphs = 2});
  for (int i = 0; i < 24; ++i) {
    const int64_t number = i < 16 ? 2 + i % 2 : i;  // two kinds, then always new ones
    const auto data = torch::full({4}, static_cast<float>(i), on_device());
    REQUIRE(step({data, number}, {.step = i}).log[0] == static_cast<double>(4 * i * number));
  }
  REQUIRE(step.counts().captures == 2);
}

TEST_CASE("modes that a step is called in have graphs of their own") {
  torch::manual_seed(3);
  torch::nn::Sequential module(torch::nn::Linear(8, 8), torch::nn::BatchNorm1d(8));
  module->to(context().device());
  DistributedDataParallel model(module, group());
  at::ScalarType dtype = at::kFloat;
  GraphedStep step(
      context(), {.models = {&model}},
      [&](const at::Tensor& batch, const StepScalars&) {
        model.zero_grad();
        const auto output = model.forward(batch);
        const auto product = batch.mm(batch.t());
        dtype = product.scalar_type();
        (output.square().sum() + product.sum()).backward();
        return std::vector{output.sum(), product.sum(),
                           module->parameters()[0].grad().square().sum().to(at::kFloat)};
      },
      GraphedStepOptions{.mode = CudaGraph::On});
  const auto run = [&](int from) {
    int64_t replayed = step.counts().replayed;
    for (int i = from; i < from + kFewSteps; ++i) {
      auto batch = torch::full({4, 8}, 1.0F / static_cast<float>(3 + i), on_device());
      batch.requires_grad_();
      step(batch, {.step = i}).log[0].value();
    }
    return step.counts().replayed - replayed;
  };
  // Several ranks rebuild their buckets after the first step and warm up again.
  run(0);
  const int64_t captures = step.counts().captures;
  const auto mean = [&] { return module->named_buffers()["1.running_mean"].clone(); };
  const auto moved_from = mean();
  REQUIRE(run(20) == kFewSteps);
  REQUIRE_FALSE(torch::equal(mean(), moved_from));
  // A frozen BatchNorm in a training model keeps its statistics from here on.
  module[1]->eval();
  const auto frozen = mean();
  REQUIRE(run(40) == kFewSteps - 1);
  REQUIRE(torch::equal(mean(), frozen));
  module[1]->train();
  REQUIRE(run(60) == kFewSteps);
  REQUIRE_FALSE(torch::equal(mean(), frozen));
  REQUIRE(step.counts().captures == captures + 1);
  {
    const Autocast autocast(AmpOptions{.dtype = AmpDtype::Bf16});
    REQUIRE(run(80) == kFewSteps - 1);
    REQUIRE(dtype == at::kBFloat16);
  }
  REQUIRE(step.counts().captures == captures + 2);
  if (has_ranks(2)) {
    const auto no_sync = model.no_sync();
    // The first one begins with rank 0's buffers, as the step before sent them.
    REQUIRE(run(100) == kFewSteps - 2);
    REQUIRE(step.counts().captures == captures + 3);
  }
}

namespace {

/// Calls `round` with a small model and a step that adds to its gradients, as graphs and eagerly.
/// The gradients after each round must be equal. Returns the counts of the graphs.
template <typename Round>
GraphedStepCounts require_equal_sums(int64_t num_rounds, const Round& round) {
  const auto train = [&](CudaGraph mode) {
    Mlp module;
    DistributedDataParallel model(module, group());
    GraphedStep step(
        context(), {.models = {&model}},
        [&](const at::Tensor& batch, const StepScalars&) {
          const auto loss = model.forward(batch).sum();
          loss.backward();
          return loss.detach();
        },
        GraphedStepOptions{.mode = mode});
    std::vector<at::Tensor> grads;
    for (int64_t i = 0; i < num_rounds; ++i) {
      round(model, *module, step, i);
      const auto now = grads_of(*module);
      grads.insert(grads.end(), now.begin(), now.end());
    }
    return std::pair(grads, step.counts());
  };
  const auto [graphed, counts] = train(CudaGraph::On);
  require_equal(graphed, train(CudaGraph::Off).first);
  return counts;
}

}  // namespace

TEST_CASE("micro-steps by themselves add up as eager ones do") {
  const auto counts = require_equal_sums(10, [](auto& model, auto&, auto& step, int64_t round) {
    model.zero_grad();
    for (int64_t micro = 0; micro < 3; ++micro) {
      std::optional<NoSync> no_sync;
      if (micro < 2) {
        no_sync.emplace(model);
      }
      step(batch_of(rank(), 3 * round + micro, 4), {.step = round});
    }
  });
  CHECK(counts.replayed > 0);
}

TEST_CASE("replays leave gradients that wait, or wait no longer, as eager steps do") {
  const auto counts =
      require_equal_sums(3 * kFewSteps, [](auto& model, auto&, auto& step, int64_t round) {
        if (round % 4 == 0) {
          model.zero_grad();  // else the local step adds to means
        }
        const auto weighted = [&] {
          model.weighted_backward(model.forward(batch_of(rank(), round, 4)).sum(), 2);
        };
        {
          const auto no_sync = model.no_sync();
          step(batch_of(rank(), 2 * round, 4), {.step = 2 * round});
        }
        CAPTURE(round);
        REQUIRE_THROWS_WITH(weighted(), Catch::Contains("weighted_backward while gradients"));
        step(batch_of(rank(), 2 * round + 1, 4), {.step = 2 * round + 1});
        REQUIRE_NOTHROW(weighted());
      });
  CHECK(counts.replayed > 0);
}

TEST_CASE("a replay adds to no gradient but those that its capture added to") {
  std::vector<at::Tensor> own;  // the user's own gradients have other addresses each time
  const auto counts = require_equal_sums(12, [&](auto&, auto& module, auto& step, int64_t i) {
    for (const auto& parameter : module.parameters()) {
      own.push_back(torch::full_like(parameter, static_cast<double>(i)));
      parameter.mutable_grad() = own.back();
    }
    step(batch_of(rank(), i, 4), {.step = i});
  });
  CHECK(counts.captures > 0);
}

TEST_CASE("counts that a later step takes up cannot be captured") {
  Mlp module;
  DistributedDataParallel model(module, group());
  GraphedStep step(context(), {.models = {&model}},
                   [&](const at::Tensor& batch, const StepScalars&) {
                     model.weighted_backward(model.forward(batch).sum(), 3);
                     return batch.sum();
                   });
  for (int64_t i = 0; i < 2 * kFewSteps; ++i) {
    std::optional<NoSync> no_sync;
    if (i % 2 == 0) {
      no_sync.emplace(model);
    }
    step(batch_of(rank(), i, 4), {.step = i});
  }
  REQUIRE(step.counts().replayed == 0);
  REQUIRE_THAT(step.counts().why_eager, Catch::Contains("all micro-batches"));
}

TEST_CASE("a forward without a backward hinders no capture, and its buffers arrive") {
  const auto train = [](CudaGraph mode) {
    torch::manual_seed(3);
    torch::nn::Sequential module(torch::nn::Linear(8, 8), torch::nn::BatchNorm1d(8));
    module->to(context().device());
    DistributedDataParallel model(module, group());
    GraphedStep step(
        context(), {.models = {&model}},
        [&](const at::Tensor& batch, const StepScalars&) {
          model.zero_grad();
          const auto loss = model.forward(batch).square().sum();
          loss.backward();
          return loss.detach();
        },
        GraphedStepOptions{.mode = mode});
    std::vector<at::Tensor> seen;
    for (int i = 0; i < kFewSteps; ++i) {
      const auto batch = counted({4, 8}, i + 10 * rank()) / 100;
      model.forward(batch);
      step(batch, {.step = i});
      seen.push_back(module->named_buffers()["1.running_mean"].clone());
    }
    return std::pair(seen, step.counts());
  };
  const auto [graphed, counts] = train(CudaGraph::On);
  CHECK(counts.replayed > 0);
  require_equal(graphed, train(CudaGraph::Off).first);
}

TEST_CASE("no stream of the pool takes part in a capture") {
  // Code that takes a pool stream during a capture (a loader) must not enqueue into the graph.
  int64_t met = -1;
  c10::cuda::getStreamFromPool(false), c10::cuda::getStreamFromPool(true);  // creates the pool
  Setup setup{.name = "streams", .optimizer = {.momentum = 0.9}};
  setup.after_step = [&](const at::Tensor&) {
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None) {
      return;
    }
    met = 0;
    for (int draw = 0; draw < 64; ++draw) {
      for (const bool high : {false, true}) {
        auto status = cudaStreamCaptureStatusNone;
        const auto stream = c10::cuda::getStreamFromPool(high);
        REQUIRE(cudaStreamIsCapturing(stream, &status) == cudaSuccess);
        met += status != cudaStreamCaptureStatusNone ? 1 : 0;
      }
    }
  };
  train(setup, CudaGraph::On, kFewSteps);
  REQUIRE(met == 0);
}

TEST_CASE("a log can be read when its GraphedStep is gone") {
  auto big = torch::randn({4096, 4096}, on_device());
  std::vector<StepLog> logs;
  {
    GraphedStep step(
        context(), {},
        [&](const at::Tensor& batch, const StepScalars&) {
          for (int i = 0; i < 60; ++i) {  // longer than the first poll of the job's health
            torch::mm(big, big);
          }
          return batch.sum();
        },
        GraphedStepOptions{.mode = CudaGraph::On});
    for (int i = 0; i < kFewSteps; ++i) {
      logs.push_back(step(torch::full({4}, static_cast<float>(i), on_device()), {}).log);
    }
  }
  REQUIRE_FALSE(logs.back().is_ready());
  REQUIRE(logs.back()[0] == 4.0 * (kFewSteps - 1));
}
