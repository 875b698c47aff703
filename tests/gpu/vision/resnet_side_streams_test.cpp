// SPDX-License-Identifier: Apache-2.0
// A ResNet whose ops run on side streams, and which prefetches the dense matrices of its filters.
#include "ddp/ops/vision.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "gpu/capture.hpp"
#include "models/memory_format.hpp"
#include "models/precision.hpp"
#include "models/resnet.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

models::ResNet make_model(bool side_streams) {
  torch::manual_seed(8);
  auto module = models::resnet18({.num_classes = 10, .side_streams = side_streams});
  module->to(context().device());
  models::to_half_but_norms(*module, torch::kBFloat16);
  models::to_channels_last(*module);
  return module;
}

torch::Tensor images_of(int64_t size, int64_t count) {
  return torch::randn({count, 3, size, size}, on_device())
      .to(torch::kBFloat16)
      .contiguous(at::MemoryFormat::ChannelsLast);
}

OptimizerOptions rule(double weight_decay, bool nesterov) {
  OptimizerOptions options;
  options.momentum = 0.9;
  options.nesterov = nesterov;
  options.weight_decay = weight_decay;
  options.implementation = OptimizerImplementation::Flat;
  return options;
}

/// Output for `images` of a model with the same weights and no side streams.
torch::Tensor expected_of(const models::ResNet& trained, const torch::Tensor& images) {
  auto model = make_model(false);
  const auto copy = [](const auto& from, const auto& to) {
    for (const auto& item : from) {
      to[item.key()].copy_(item.value());
    }
  };
  copy(trained->named_parameters(), model->named_parameters());
  copy(trained->named_buffers(), model->named_buffers());
  model->eval();
  return model->forward(images);
}

}  // namespace

TEST_CASE("a ResNet on side streams trains the plain run's weights") {
  const auto images = images_of(32, 64);
  const auto labels = torch::randint(10, {64}, on_device().dtype(torch::kLong));
  std::vector<torch::Tensor> plain;
  for (const bool side_streams : {false, true}) {
    auto module = make_model(side_streams);
    DistributedDataParallel model(module, group(), with_cap(side_streams ? 0.25 : 25));
    auto optimizer = make_optimizer(model, rule(0.01, /*nesterov=*/true));
    for (int step = 0; step < 20; ++step) {
      model.zero_grad();
      ops::cross_entropy(model.forward(images), labels).loss.backward();
      optimizer->step(0.0625);
    }
    const auto parameters = module->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      INFO("parameter " << i);
      if (side_streams) {
        CHECK(torch::equal(parameters[i].detach(), plain[i]));
      } else {
        plain.push_back(parameters[i].detach().clone());
      }
    }
  }
}

TEST_CASE("prefetched filters have the latest weights, in a graph too") {
  // At 32 px the filters of layer 4 read one tap; at 64 px they read all nine, as one dense
  // product.
  auto module = make_model(true);
  DistributedDataParallel model(module, group(), {});
  // This weight decay changes taps without a gradient by more than bf16 rounding.
  auto optimizer = make_optimizer(model, rule(0.05, /*nesterov=*/false));
  const auto small = images_of(32, 32), large = images_of(64, 32);
  const auto labels = torch::randint(10, {32}, on_device().dtype(torch::kLong));
  const auto train = [&](int steps) {
    module->train();
    for (int step = 0; step < steps; ++step) {
      model.zero_grad();
      ops::cross_entropy(model.forward(small), labels).loss.backward();
      optimizer->step(0.0625);
    }
    module->eval();
  };
  train(10);
  const torch::NoGradGuard no_grad;
  const auto eager = module->forward(large);
  CHECK(torch::equal(eager, expected_of(module, large)));

  torch::Tensor replayed;
  at::cuda::CUDAGraph graph;
  capture(graph, [&] { replayed = module->forward(large); });
  for (int round = 0; round < 2; ++round) {
    CAPTURE(round);
    {
      const torch::AutoGradMode with_grad(true);
      train(10);
    }
    graph.replay();
    const auto now = replayed.clone();
    CHECK(torch::equal(now, expected_of(module, large)));
    CHECK_FALSE(torch::equal(now, eager));
  }
}
