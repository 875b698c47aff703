// SPDX-License-Identifier: Apache-2.0
// Steps that cannot be captured: an error or log line names the operation and the reason, the step
// is refused or runs eagerly, and nothing is lost.
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include "gpu/graphed_step_test.hpp"
#include "optim/torch_optimizer.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

bool capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

struct Bad {
  std::string name;
  std::function<void(const at::Tensor& loss)> before;  // called before the backward
  std::function<void(const at::Tensor& loss)> after;   // called after the optimizer's step
  std::vector<std::string> said;
};

std::vector<Bad> bad_steps() {
  const auto nothing = [](const at::Tensor&) {};
  const auto pinned = torch::ones({3}).pin_memory();
  return {
      {"waits in forward",
       [](const at::Tensor& loss) { loss.item<float>(); },
       nothing,
       {"aten::_local_scalar_dense", "waits for the device"}},
      {"waits at its end",
       nothing,
       [](const at::Tensor& loss) { loss.nonzero(); },
       {"aten::nonzero", "waits for the device"}},
      {"copies from the host",
       [](const at::Tensor& loss) { torch::ones({3}).to(loss.device(), /*non_blocking=*/true); },
       nothing,
       {"aten::copy_", "CPU"}},
      {"copies from page-locked memory",
       [pinned](const at::Tensor& loss) { pinned.to(loss.device(), /*non_blocking=*/true); },
       nothing,
       {"12 bytes from host memory"}},
      {"too much memory",
       [](const at::Tensor& loss) {
         if (capturing()) {
           at::empty({int64_t{1} << 42}, loss.options());
         }
       },
       nothing,
       {"out of memory", "train.cuda_graph=off"}},
      {"throws in capture alone",
       nothing,
       [](const at::Tensor&) {
         if (capturing()) {
           throw std::runtime_error("the user's own reason");
         }
       },
       {"the user's own reason"}},
  };
}

}  // namespace

TEST_CASE("a step that cannot be captured runs eagerly, and the capture leaves no trace") {
  for (const auto& bad : bad_steps()) {
    CAPTURE(bad.name);
    Setup setup{.name = bad.name};
    setup.amp = {.dtype = AmpDtype::Fp16, .growth_interval = 4};
    setup.optimizer = {.momentum = 0.9};
    setup.micro_batches = 2;
    setup.weighted = true;
    const auto eager = train(setup, CudaGraph::Off, 20);
    setup.before_backward = bad.before;
    setup.after_step = bad.after;
    const auto fallen_back = train(setup, CudaGraph::Auto, 20);
    REQUIRE(fallen_back.counts.replayed == 0);
    REQUIRE(fallen_back.counts.eager == 20);
    for (const auto& text : bad.said) {
      REQUIRE_THAT(fallen_back.counts.why_eager, Catch::Contains(text));
    }
    REQUIRE(fallen_back.log == eager.log);
    require_equal(fallen_back.tensors, eager.tensors);
    // Later captures succeed.
    setup.before_backward = nullptr;
    setup.after_step = nullptr;
    const auto graphed = train(setup, CudaGraph::On, 20);
    REQUIRE(graphed.counts.replayed > 0);
    REQUIRE(graphed.log == eager.log);
  }
}

TEST_CASE("train.cuda_graph=on refuses what cannot be captured") {
  Setup setup{.name = "refused"};
  setup.before_backward = [](const at::Tensor& loss) { loss.item<float>(); };
  REQUIRE_THROWS_WITH(train(setup, CudaGraph::On, 20),
                      Catch::Contains("train.cuda_graph=on") && Catch::Contains("aten::item"));
}

TEST_CASE("optimizers and settings that cannot be captured are named beforehand") {
  Net module;
  module->to(context().device());
  DdpOptions unused;
  unused.find_unused_parameters = true;
  for (const bool find_unused : {false, true}) {
    DistributedDataParallel model(module, group(), find_unused ? unused : DdpOptions{});
    ddp::detail::TorchOptimizer torch_sgd(
        std::make_shared<torch::optim::SGD>(module->parameters(), 0.1), model.named_parameters());
    auto ours = make_optimizer(model, OptimizerOptions{});
    Optimizer& optimizer = find_unused ? *ours : torch_sgd;
    GraphedStep step(context(), {.models = {&model}, .optimizers = {&optimizer}},
                     [&](const Batch& batch, const StepScalars& scalars) {
                       model.zero_grad();
                       auto loss =
                           torch::cross_entropy_loss(model.forward(batch.data), batch.target);
                       loss.backward();
                       optimizer.step(scalars);
                       return loss;
                     });
    for (int i = 0; i < 6; ++i) {
      step(image_batch(i, 4), {.lr = 0.01, .step = i});
    }
    REQUIRE(step.counts().eager == 6);
    REQUIRE_THAT(step.counts().why_eager,
                 Catch::Contains(find_unused ? "find_unused_parameters" : "torch::optim"));
  }
}

// Checks that six steps, whose loss is the batch's sum, run eagerly because of `why`.
template <typename Step>
void require_never_replayed(Step& step, const std::string& why) {
  const auto data = torch::ones({4}, on_device());
  for (int i = 0; i < 6; ++i) {
    REQUIRE(step({data, data}, {}).log[0] == 4);
  }
  REQUIRE(step.counts().replayed == 0);
  REQUIRE_THAT(step.counts().why_eager, Catch::Contains(why));
}

TEST_CASE("ranks whose steps differ are told, and none replays") {
  if (!has_ranks(2)) {
    return;
  }
  auto buffer = torch::ones({8}, on_device());
  GraphedStep step(context(), {}, [&](const Batch& batch, const StepScalars&) {
    group()->all_reduce(buffer)->wait();
    if (capturing() && rank() == 1) {
      group()->all_reduce(buffer)->wait();
    }
    return batch.data.sum();
  });
  require_never_replayed(step, "rank 1 calls 2 collectives, rank 0 calls 1");
  REQUIRE(buffer[0].item<double>() == std::pow(world(), 6));
}

TEST_CASE("ranks whose collectives differ in what they send are told, and none replays") {
  if (!has_ranks(2)) {
    return;
  }
  auto buffer = torch::ones({16}, on_device());
  GraphedStep step(context(), {}, [&](const Batch& batch, const StepScalars&) {
    group()->all_reduce(buffer.narrow(0, 0, capturing() && rank() == 1 ? 16 : 8))->wait();
    return batch.data.sum();
  });
  require_never_replayed(
      step,
      "collective 1 of 1 is all_reduce of 16 Float on rank 1 and all_reduce of 8 "
      "Float on rank 0");
  REQUIRE(buffer[0].item<double>() == std::pow(world(), 6));
}

TEST_CASE("a rank that captures a call alone and those that do not are told") {
  if (!has_ranks(2)) {
    return;
  }
  // If the step has a collective, the others' replays end only after rank 0 has called it.
  const bool reduces = GENERATE(false, true);
  CAPTURE(reduces);
  auto buffer = torch::ones({8}, on_device());
  GraphedStep step(context(), {}, [&](const at::Tensor& batch, const StepScalars&) {
    if (reduces) {
      group()->all_reduce(buffer)->wait();
    }
    return batch.sum();
  });
  const auto call = [&](int64_t size) {
    return step(torch::ones({size}, on_device()), {}).log[0].value();
  };
  for (int i = 0; i < 8; ++i) {
    REQUIRE(call(4) == 4);
  }
  REQUIRE(step.counts().replayed == 5);
  // Rank 0 alone gets another shape: an eager step, then a capture for which it waits.
  std::string told;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (told.empty() && std::chrono::steady_clock::now() < deadline) {
    try {
      call(rank() == 0 ? 5 : 4);
    } catch (const SettingsError& error) {
      told = error.what();
    }
  }
  if (rank() == 0) {
    REQUIRE_THAT(told, Catch::Contains("captures its call 10, and rank 1 does not"));
    if (reduces) {
      group()->all_reduce(buffer)->wait();  // lets the others' replay finish
    }
    // The failed capture leaves nothing: the next such call tries again.
    REQUIRE_THROWS_WITH(call(5), Catch::Contains("captures its call 10, and rank 1 does not"));
    REQUIRE(step.counts().captures == 1);
  } else {
    REQUIRE_THAT(told, Catch::Contains("rank 0 captures its call 10 (batch [5]") &&
                           Catch::Contains("whose last batch was [4]"));
    for (int i = 0; i < 2; ++i) {
      context().control_plane().all_gather("went another way");  // ends rank 0's wait
    }
  }
}

TEST_CASE("a rank's reason is told on all ranks") {
  if (!has_ranks(2)) {
    return;
  }
  auto buffer = torch::ones({8}, on_device());
  GraphedStep step(context(), {}, [&](const Batch& batch, const StepScalars&) {
    group()->all_reduce(buffer)->wait();
    if (capturing() && rank() == 1) {
      throw std::runtime_error("only here");
    }
    return batch.data.sum();
  });
  const auto data = torch::ones({4}, on_device());
  for (int i = 0; i < 6; ++i) {
    step({data, data}, {});
  }
  REQUIRE(step.counts().eager == 6);
  REQUIRE_THAT(step.counts().why_eager,
               Catch::Contains("on rank 1") && Catch::Contains("only here"));
}
