// SPDX-License-Identifier: Apache-2.0
// Steps that cannot be captured: an error or log line names the operation and the reason, the step
// is refused or runs eagerly, and nothing is lost.
#include <ATen/cuda/CUDAGraph.h>

#include "gpu/graph/graphed_step_test.hpp"
#include "optim/torch_optimizer.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

struct Bad {
  std::string name;
  std::function<void(const at::Tensor& loss)> before;  // called before the backward
  std::function<void(const at::Tensor& loss)> after;   // called after the optimizer's step
  std::vector<std::string> said;
};

constexpr int64_t kFits = 8;  // batch sizes
constexpr int64_t kThrows = 5;

// Its backward throws between the gradients of its two layers if the batch has the size kThrows.
struct HalvesImpl : torch::nn::Module {
  HalvesImpl() {
    first = register_module("first", torch::nn::Linear(3 * 12 * 12, 40));
    second = register_module("second", torch::nn::Linear(40, 40));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto hidden = torch::relu(first(x.flatten(1)));
    if (x.size(0) == kThrows) {
      hidden.register_hook([](const at::Tensor& grad) -> at::Tensor {
        TORCH_CHECK(!grad.defined(), "thrown between two gradients");
        return grad;
      });
    }
    return second(hidden);
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Halves);

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

// The rest of a broken backward is reduced before a capture or a replay, so graphs do not contain
// it and fit the steps after it.
TEST_CASE("a backward that threw does not keep the next steps from being captured and replayed") {
  constexpr int kWarmups = 3;
  constexpr int kSteps = 5;
  const auto train_in = [](CudaGraph mode) {
    torch::manual_seed(5);
    Halves module;
    module->to(context().device());
    DistributedDataParallel model(module, group(), with_cap(0.005));
    GraphedStep<Batch, std::vector<at::Tensor>> step(
        context(), {.models = {&model}},
        [&](const Batch& batch, const StepScalars&) {
          model.forward(batch.data).square().mean().backward();
          std::vector<at::Tensor> gradients;
          for (const auto& parameter : module->parameters()) {
            gradients.push_back(parameter.grad().clone());
          }
          model.zero_grad();
          return gradients;
        },
        GraphedStepOptions{.mode = mode});
    std::vector<at::Tensor> gradients;
    int64_t i = 0;
    const auto run = [&](int64_t size) {
      for (const auto& gradient : step(image_batch(i++, size), {.step = i}).outputs) {
        gradients.push_back(gradient.clone());
      }
    };
    for (const int num_steps : {kWarmups, kSteps, kSteps}) {
      for (int k = 0; k < num_steps; ++k) {
        run(kFits);
      }
      REQUIRE_THROWS_WITH(run(kThrows), Catch::Contains("between two gradients"));
    }
    REQUIRE(step.counts().replayed == (mode == CudaGraph::On ? 2 * kSteps : 0));
    return gradients;
  };
  require_equal(train_in(CudaGraph::On), train_in(CudaGraph::Off));
}
