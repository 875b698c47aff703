// SPDX-License-Identifier: Apache-2.0
// Captured steps that leave taps behind, beside captured steps that read all of them.
#include "ddp/ops/conv2d.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/train/graphed_step.hpp"
#include "distributed/ddp_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

struct OneFilterImpl : torch::nn::Module {
  OneFilterImpl() {
    weight = register_parameter(
        "weight",
        (integers({8, 8, 3, 3}, 3).cpu() / 32.0).contiguous(at::MemoryFormat::ChannelsLast));
    to(context().device());
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return ops::conv2d(
        x, weight, 1, 1,
        x.size(2) == 1 ? ops::Conv2dAlgorithm::Product : ops::Conv2dAlgorithm::Library);
  }
  torch::Tensor weight;
};
TORCH_MODULE(OneFilter);

at::Tensor trained(bool skip) {
  at::globalContext().setDeterministicCuDNN(true);
  OneFilter module;
  DistributedDataParallel model(module, group());
  auto optimizer = make_optimizer(model, {.weight_decay = 0.05,
                                          .momentum = 0.9,
                                          .implementation = OptimizerImplementation::Flat,
                                          .skip_dead_taps = skip});
  GraphedStep step(
      context(), {.models = {&model}, .optimizers = {&optimizer}},
      [&](const at::Tensor& batch, const StepScalars& scalars) {
        model.zero_grad();
        auto loss = model.forward(batch).square().mean();
        loss.backward();
        optimizer.step(scalars);
        return loss;
      },
      GraphedStepOptions{.mode = CudaGraph::On});
  int index = 0;
  const auto train = [&](int variant) {
    const auto x = integers({2, 8, variant == 0 ? 1 : 6, variant == 0 ? 1 : 6}, 50 + index) / 8.0;
    step(x.contiguous(at::MemoryFormat::ChannelsLast),
         {.lr = 0.05 / (1 + index % 3), .step = index, .variant = variant});
    ++index;
  };
  for (const int variant : {0, 1}) {  // the second is captured when the first leaves taps behind
    for (int i = 0; i < 6; ++i) {
      train(variant);
    }
  }
  for (int i = 0; i < 20; ++i) {
    train(i % 2);
  }
  for (int i = 0; i < 5; ++i) {
    train(0);
  }
  REQUIRE(step.counts().captures == 2);
  REQUIRE(step.counts().replayed >= 30);
  return model.state_dict().tensors.at("weight").clone();
}

}  // namespace

TEST_CASE("replays that leave taps behind go with replays that read them") {
  const auto plain = trained(false);
  const auto skips = trained(true);
  CHECK(torch::allclose(skips, plain, 1e-5, 1e-6));
  CHECK_FALSE(torch::equal(skips, plain));  // one rounding for several
}
