// SPDX-License-Identifier: Apache-2.0
// Training with ops that run on streams of their own.
#include "ddp/ops/cross_entropy.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "models/memory_format.hpp"
#include "models/precision.hpp"
#include "models/resnet.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

constexpr double kLr = 0.0625;

OptimizerOptions rule() {
  OptimizerOptions options;
  options.momentum = 0.9;
  options.nesterov = true;
  options.weight_decay = 0.01;
  options.implementation = OptimizerImplementation::Flat;
  return options;
}

}  // namespace

TEST_CASE("a ResNet on side streams trains the plain run's weights") {
  const auto images = torch::randn({64, 3, 32, 32}, on_device())
                          .to(torch::kBFloat16)
                          .contiguous(at::MemoryFormat::ChannelsLast);
  const auto labels = torch::randint(10, {64}, on_device().dtype(torch::kLong));
  std::vector<torch::Tensor> plain;
  for (const bool beside : {false, true}) {
    torch::manual_seed(8);
    auto module = models::resnet18({.num_classes = 10, .side_streams = beside});
    module->to(context().device());
    models::to_half_but_norms(*module, torch::kBFloat16);
    models::to_channels_last(*module);
    DistributedDataParallel model(module, group(), with_cap(beside ? 0.25 : 25));
    auto optimizer = make_optimizer(model, rule());
    for (int step = 0; step < 20; ++step) {
      model.zero_grad();
      auto loss = ops::cross_entropy(model.forward(images), labels).loss;
      loss.backward();
      optimizer.step(kLr);
    }
    const auto parameters = module->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      INFO("parameter " << i);
      if (beside) {
        CHECK(torch::equal(parameters[i].detach(), plain[i]));
      } else {
        plain.push_back(parameters[i].detach().clone());
      }
    }
  }
}
