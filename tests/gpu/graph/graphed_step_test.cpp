// SPDX-License-Identifier: Apache-2.0
// A replayed training step gives the bits of an eager one: parameters, buffers, optimizer, scaler
// and every logged number, over 200 steps.
#include <ATen/cuda/CUDAContext.h>

#include <array>

#include "gpu/graph/graphed_step_test.hpp"
#include "reduce/reducer.hpp"
#include "train/graph/captured_step.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

constexpr int64_t kSteps = 200;

std::vector<Setup> setups() {
  Setup plain{.name = "fp32, SGD, dropout, clip"};
  plain.optimizer = {.weight_decay = 1e-4, .momentum = 0.9, .nesterov = true};
  plain.max_grad_norm = 0.5;
  Setup bf16{.name = "bf16, AdamW, last partial batch"};
  bf16.amp.dtype = AmpDtype::Bf16;
  bf16.optimizer = {.type = OptimizerType::AdamW, .weight_decay = 0.01};
  bf16.partial_every = 7;
  Setup fp16{.name = "fp16, loss scale that overflows, clip, average of the weights"};
  fp16.amp = {.dtype = AmpDtype::Fp16, .growth_interval = 4};
  fp16.optimizer = {.momentum = 0.9};
  fp16.max_grad_norm = 1.0;
  fp16.ema = true;
  Setup accumulated{.name = "two micro-batches, weighted, bf16"};
  accumulated.amp.dtype = AmpDtype::Bf16;
  accumulated.optimizer = {.type = OptimizerType::Adam};
  accumulated.micro_batches = 2;
  accumulated.weighted = true;
  return {plain, bf16, fp16, accumulated};
}

Net on_gpu() {
  Net module;
  module->to(context().device());
  return module;
}

/// One step trains a Net and another evaluates it, in one memory pool.
struct TwoSteps {
  TwoSteps() { REQUIRE(evaluation.pool() == training.pool()); }

  void train(int64_t size, int num) {
    for (int i = 0; i < num; ++i) {
      training(image_batch(i, size), {.lr = 0.01});
    }
  }

  Net module = on_gpu();
  DistributedDataParallel<Net> model{module, group()};
  std::unique_ptr<Optimizer> optimizer = make_optimizer(model, OptimizerOptions{});
  GraphedStep<Batch, at::Tensor> training{
      context(),
      {.models = {&model}, .optimizers = {optimizer.get()}},
      [this](const Batch& batch, const StepScalars& scalars) {
        model.zero_grad();
        auto loss = torch::cross_entropy_loss(model.forward(batch.data), batch.target);
        loss.backward();
        optimizer->step(scalars);
        return loss;
      },
      GraphedStepOptions{.mode = CudaGraph::On, .max_graphs = 2}};
  GraphedStep<Batch, at::Tensor> evaluation{
      context(),
      {.models = {&model}, .optimizers = {optimizer.get()}},
      [this](const Batch& batch, const StepScalars&) { return module->forward(batch.data).sum(); },
      GraphedStepOptions{.mode = CudaGraph::On},
      training.pool()};
};

}  // namespace

TEST_CASE("200 replayed steps are 200 eager ones, bit for bit") {
  for (const auto& setup : setups()) {
    CAPTURE(setup.name);
    const auto eager = train(setup, CudaGraph::Off, kSteps);
    const auto graphed = train(setup, CudaGraph::On, kSteps);
    REQUIRE(eager.counts.eager == kSteps);
    REQUIRE(graphed.counts.replayed > kSteps - 12);
    REQUIRE(graphed.counts.captures == (setup.partial_every > 0 ? 2 : 1));
    REQUIRE(graphed.log == eager.log);
    require_equal(graphed.tensors, eager.tensors);
    REQUIRE(eager.log.front() != eager.log.back());
    if (setup.amp.dtype == AmpDtype::Fp16) {
      // The scale doubles every four steps until gradients overflow, so many steps overflowed.
      REQUIRE(graphed.loss_scale == eager.loss_scale);
      REQUIRE(eager.loss_scale < 65536.0 * (1LL << 30));
    }
  }
}

TEST_CASE("replays do not make the host wait") {
  Setup setup{.name = "no waits"};
  setup.amp = {.dtype = AmpDtype::Fp16, .growth_interval = 4};
  setup.max_grad_norm = 1.0;
  setup.refuse_host_waits_after = 10;
  const auto graphed = train(setup, CudaGraph::On, 60);
  REQUIRE(graphed.counts.replayed > 50);
}

TEST_CASE("numbers can be read late, and the host does not run away") {
  auto weight = torch::zeros({1}, on_device());
  GraphedStep step(context(), {}, [&](const Batch& batch, const StepScalars& scalars) {
    weight.add_(batch.data.mean());
    return std::vector{weight, scalars.lr.tensor(weight.device())};
  });
  std::vector<StepLog> logs;
  for (int64_t i = 0; i < 300; ++i) {
    const auto data = torch::full({512, 512}, 1.0, on_device());
    logs.push_back(step({data, data}, {.lr = 0.25 * static_cast<double>(i), .step = i}).log);
    if (i >= StepLog::kMaxStepsAhead) {
      const auto late = i - StepLog::kMaxStepsAhead;
      REQUIRE(logs[static_cast<size_t>(late)].is_ready());
      REQUIRE(logs[static_cast<size_t>(late)][0] == static_cast<double>(late + 1));
      REQUIRE(logs[static_cast<size_t>(late)][1] == 0.25 * static_cast<double>(late));
    }
  }
  // A number survives 127 later steps. The 128th step overwrites it, whether or not it has ended.
  REQUIRE_THROWS_AS(logs[171][0].value(), SettingsError);
  REQUIRE(logs[172][0] == 173);
  REQUIRE(logs[299][0] == 300);
  REQUIRE(logs[299].is_ready());
  REQUIRE_THROWS_AS(logs[0][0].value(), SettingsError);
  REQUIRE(step.counts().replayed == 297);
}

TEST_CASE("shapes have graphs of their own, as many as are kept") {
  TwoSteps steps;
  const auto& step = steps.training;
  steps.train(8, 8);
  REQUIRE(step.counts().captures == 1);
  steps.train(5, 3);
  REQUIRE(step.counts().captures == 2);
  const auto eager_before = step.counts().eager;
  steps.train(3, 2);  // a third kind runs eagerly
  REQUIRE(step.counts().captures == 2);
  REQUIRE(step.counts().eager == eager_before + 2);
  steps.train(8, 1);
  REQUIRE(step.counts().eager == eager_before + 2);
}

TEST_CASE("an evaluation in the pool of the training step sees the weights of now") {
  TwoSteps steps;
  auto& module = steps.module;
  steps.train(8, 8);
  module->eval();
  {
    const torch::NoGradGuard no_grad;
    for (int i = 0; i < 6; ++i) {
      const auto batch = image_batch(100 + i, 8);
      const double expected = module->forward(batch.data).sum().item<double>();
      {
        const torch::AutoGradMode grad(true);
        module->train();
        steps.training(image_batch(i, 8), {.lr = 0.0});  // overwrites the pool, but not the weights
        module->eval();
      }
      const double sum = steps.evaluation(batch, {}).log[0];
      // Running statistics have changed since, so this compares with the current forward.
      const double now = module->forward(batch.data).sum().item<double>();
      REQUIRE(sum == now);
      REQUIRE(std::isfinite(expected));
    }
  }
  REQUIRE(steps.evaluation.counts().replayed == 3);
  module->train();

  // A parameter's memory moves: the step is re-captured and trains the new memory.
  {
    const torch::NoGradGuard no_grad;
    module->fc->weight.set_data(module->fc->weight.clone());
  }
  const auto before = module->fc->weight.detach().clone();
  steps.train(8, 3);
  REQUIRE(steps.training.counts().captures == 2);
  REQUIRE_FALSE(torch::equal(before, module->fc->weight));
}

TEST_CASE("a new bucket layout costs a training step one eager step, an evaluation nothing") {
  TwoSteps steps;
  const auto evaluate = [&](int times) {
    const torch::NoGradGuard no_grad;
    steps.module->eval();
    for (int i = 0; i < times; ++i) {
      steps.evaluation(image_batch(i, 8), {});
    }
    steps.module->train();
  };
  evaluate(4);
  REQUIRE(steps.evaluation.counts().captures == 1);
  const auto before = steps.model.reducer().gradients().layout().version;
  steps.train(8, 6);
  const bool changed = steps.model.reducer().gradients().layout().version != before;
  REQUIRE(changed == (world() > 1));  // changed in the second step
  REQUIRE(steps.training.counts().captures == 1);
  // On several ranks the first step is a kind of its own: only it sends rank 0's buffers before its
  // forward.
  REQUIRE(steps.training.counts().eager == (world() > 1 ? 4 : 3));
  evaluate(2);
  REQUIRE(steps.evaluation.counts().captures == 1);
  REQUIRE(steps.evaluation.counts().replayed == 3);
}

TEST_CASE("small memsets of a graph become kernels that do the same in the same place") {
  constexpr int64_t kBytes = 1 << 20;
  // Each memset overwrites a part of the previous one's range: {element size, value, first byte,
  // elements}.
  const std::vector<std::array<size_t, 4>> memsets = {
      {1, 0xAB, 1, 4097},  {2, 0xBEEF, 100, 1000}, {4, 0x01020304, 400, 200},
      {1, 0, 777, 1},      {1, 7, 65536, 131072},  {4, 0x80000001, 70000, 2047},
      {4, 0, 80000, 4096}, {1, 9, 80001, 3}};
  std::vector<at::Tensor> results;
  for (const bool replaced : {false, true}) {
    const auto memory = torch::full({kBytes}, 5, on_device().dtype(torch::kByte));
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaGraphCreate(&graph, 0) == cudaSuccess);
    cudaGraphNode_t last = nullptr;
    for (const auto& [element, value, first, count] : memsets) {
      cudaMemsetParams memset{};
      memset.dst = memory.mutable_data_ptr<uint8_t>() + first;
      memset.elementSize = static_cast<unsigned>(element);
      memset.value = static_cast<unsigned>(value);
      memset.width = count;
      memset.height = 1;
      cudaGraphNode_t node = nullptr;
      REQUIRE(cudaGraphAddMemsetNode(&node, graph, last == nullptr ? nullptr : &last,
                                     last == nullptr ? 0 : 1, &memset) == cudaSuccess);
      last = node;
    }
    if (replaced) {  // all except the two of 8 KiB and more
      REQUIRE(ddp::detail::replace_small_memsets(graph) ==
              static_cast<int64_t>(memsets.size()) - 2);
      REQUIRE(ddp::detail::replace_small_memsets(graph) == 0);
    }
    cudaGraphExec_t exec = nullptr;
    REQUIRE(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    const auto stream = c10::cuda::getCurrentCUDAStream().stream();
    REQUIRE(cudaGraphLaunch(exec, stream) == cudaSuccess);
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    results.push_back(memory.cpu());
  }
  REQUIRE(torch::equal(results[0], results[1]));
  REQUIRE(results[0][1].item<int>() == 0xAB);
}

TEST_CASE("a step that clears small memory starts from zero in each replay") {
  auto counts = torch::full({8}, 3, on_device().dtype(torch::kInt));
  GraphedStep step(
      context(), {},
      [&](const at::Tensor& batch, const StepScalars&) {
        counts.zero_();
        counts.add_(batch.sum().to(torch::kInt));
        return counts[7].to(torch::kFloat);
      },
      GraphedStepOptions{.mode = CudaGraph::On});
  for (int i = 0; i < 8; ++i) {
    REQUIRE(step(torch::full({2}, static_cast<float>(i), on_device()), {}).log[0] == 2.0 * i);
  }
}

TEST_CASE("[bench] host time of a replayed step", "[.][bench]") {
  Setup setup{.name = "bench"};
  setup.amp.dtype = AmpDtype::Bf16;
  setup.optimizer = {.momentum = 0.9};
  setup.max_grad_norm = 1.0;
  bench_host_time(setup);
}
