// SPDX-License-Identifier: Apache-2.0
// Captured backwards of ops that write gradients straight into buckets, with shared and with frozen
// parameters: the gradients of plain LibTorch.
#include <ATen/cuda/CUDAGraph.h>

#include "ddp/train/graphed_step.hpp"
#include "distributed/reduce/fused_op_models.hpp"
#include "gpu/capture.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

/// Captures `events` of `runs`, and compares replays on new inputs with plain LibTorch.
void check_captured(OpRuns& runs, const std::string& events) {
  torch::Tensor inputs[] = {op_input(runs.op(), rank(), 0).detach(),
                            op_input(runs.op(), rank(), 1).detach()};
  const auto step = [&] {
    runs.ours.zero_grad();
    run_events(events, 0, [&](char which, int64_t) {
      // A recomputed op needs an input with a gradient.
      return runs.wrapper(which).forward(inputs[which - 'a'].detach().requires_grad_());
    });
  };
  at::cuda::CUDAGraph graph;
  warm_up_and_capture(graph, step);
  for (int replay = 0; replay < 2; ++replay) {
    for (const char which : {'a', 'b'}) {
      inputs[which - 'a'].copy_(op_input(runs.op(), rank(), replay + which).detach());
    }
    graph.replay();
    runs.plain.zero_grad();
    run_events(events, replay, [&](char which, int64_t s) {
      return mean_loss(which == 'a' ? runs.plain.a : runs.plain.b, s);
    });
    runs.check();
  }
}

}  // namespace

TEST_CASE("captured backwards of models that share an op's parameters") {
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  for (const auto& op : fused_ops(context().device())) {
    for (const bool is_one : {false, true}) {
      for (const auto& events : {"aAbB", "abBA", "ab+"}) {
        CAPTURE(op.name, is_one, events);
        OpRuns runs(op, is_one);
        runs.wrap(/*both=*/true);
        check_captured(runs, events);
      }
    }
  }
}

TEST_CASE("captured backwards of recomputed ops of models that share parameters") {
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  for (const auto& op : fused_ops(context().device())) {
    for (const auto& events : {"aA", "aAbB", "abAB"}) {
      CAPTURE(op.name, events);
      OpRuns runs(op, /*is_one=*/false);
      runs.ours.set_recomputed();
      runs.wrap(/*both=*/std::string(events) != "aA");
      check_captured(runs, events);
    }
  }
}

TEST_CASE("captured backwards of an op with frozen parameters, recomputed or not") {
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  for (const auto& op : fused_ops(context().device())) {
    for (const auto& trained : choices_of_trained(op)) {
      for (const bool recomputed : {false, true}) {
        CAPTURE(op.name, trained, recomputed);
        OpRuns runs(op, /*is_one=*/true);
        if (recomputed) {
          runs.ours.set_recomputed();
        }
        runs.wrap(/*both=*/false);
        runs.set_trained(trained);
        check_captured(runs, "aA");
      }
    }
  }
}

TEST_CASE("a captured recomputation repeats its draws, and each replay draws anew") {
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  const auto x = torch::ones({64, 64}, on_device().dtype(torch::kBFloat16));
  const auto result = torch::empty_like(x), grad = torch::empty_like(x);
  const auto step = [&] {
    const auto input = x.detach().requires_grad_();
    // By this library's generator numbers, and by LibTorch's.
    const auto y = ops::checkpoint(
        [](const auto& in) { return torch::dropout(ops::dropout(in[0], 0.5), 0.5, true); },
        {input});
    y.sum().backward();
    result.copy_(y.detach());
    grad.copy_(input.grad());
  };
  at::cuda::CUDAGraph graph;
  warm_up_and_capture(graph, step);
  torch::Tensor last;
  for (int replay = 0; replay < 3; ++replay) {
    graph.replay();
    CHECK(torch::equal(grad, result));  // of ones: 0 or 4 each
    CHECK(result.max().item<double>() == 4);
    CHECK(result.min().item<double>() == 0);
    CHECK((!last.defined() || !torch::equal(result, last)));
    last = result.clone();
  }
}

TEST_CASE("steps of ops whose counts belong to the next step are refused, not captured") {
  for (const auto& op : fused_ops(context().device())) {
    for (const bool recomputed : {false, true}) {
      CAPTURE(op.name, recomputed);
      OpRuns runs(op, /*is_one=*/true);
      if (recomputed) {
        runs.ours.set_recomputed();
      }
      runs.wrap(/*both=*/false);
      auto& model = *runs.model_a;
      GraphedStep step(context(), {.models = {&model}},
                       [&](const torch::Tensor& batch, const StepScalars&) {
                         const auto loss = model.forward(batch.detach().requires_grad_());
                         model.weighted_backward(loss, 3);
                         return loss.detach();
                       });
      for (int64_t i = 0; i < 16; ++i) {
        std::optional<NoSync> local;
        if (i % 2 == 0) {
          local.emplace(model);
        }
        step(op_input(op, rank(), i).detach(), {.step = i});
      }
      CHECK(step.counts().replayed == 0);
      CHECK_THAT(step.counts().why_eager, Catch::Contains("all micro-batches"));
    }
  }
}
