// SPDX-License-Identifier: Apache-2.0
// GradScaler, clipping and the optimizer on reduced gradients: all ranks make the same decisions
// and steps.
#include "ddp/amp/amp.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "distributed/ddp_test_utils.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

std::vector<torch::Tensor> values_of(torch::nn::Module& module) {
  std::vector<torch::Tensor> values;
  for (const auto& parameter : module.parameters()) {
    values.push_back(parameter.detach().clone());
  }
  return values;
}

AmpOptions scaling() {
  AmpOptions options;
  options.grad_scaling = GradScaling::On;
  options.init_scale = 64;
  return options;
}

}  // namespace

TEST_CASE("an inf on one rank skips the step on all, the next step is the mean's") {
  Mlp module;
  Mlp reference;
  DistributedDataParallel model(module, group());
  auto optimizer = make_optimizer(model, {});
  GradScaler scaler(scaling());
  const bool unscale_first = GENERATE(false, true);
  const double lr = 0.25;  // a power of two: updates are exact
  for (int64_t step = 0; step < 2; ++step) {
    const auto before = values_of(*module);
    model.zero_grad();
    auto loss = model.forward(batch_of(rank(), step, 4)).sum();
    if (step == 0 && rank() == world() - 1) {
      loss = loss * std::numeric_limits<float>::infinity();
    }
    scaler.scale(loss).backward();
    torch::Tensor norm;
    if (unscale_first) {
      scaler.unscale_(*optimizer);
      norm = clip_grad_norm_(model, 0);
    }
    scaler.step(*optimizer, lr);
    scaler.update();
    CHECK(scaler.get_scale() == 32);  // halved by step 0 on every rank
    if (step == 0) {
      require_equal(values_of(*module), before);
      continue;
    }
    const auto grads = mean_reference(
        reference, [&](Mlp& plain) { return plain->forward(concatenated(step, 4)).sum(); });
    std::vector<torch::Tensor> expected;
    auto square = torch::zeros({}, on_device());
    for (size_t i = 0; i < grads.size(); ++i) {
      expected.push_back(before[i] - lr * grads[i]);
      square += grads[i].square().sum();
    }
    require_equal(values_of(*module), expected);
    if (unscale_first) {
      CHECK(norm.item<double>() == Approx(square.sqrt().item<double>()));
    }
  }
}

TEST_CASE("optimizer and scaler state are the same on all ranks") {
  Mlp module(3, 1);
  DistributedDataParallel model(module, group());
  OptimizerOptions options;
  options.type = OptimizerType::AdamW;
  auto optimizer = make_optimizer(model, options);
  GradScaler scaler(scaling());
  for (int64_t step = 0; step < 4; ++step) {
    model.zero_grad();
    scaler.scale(model.forward(batch_of(rank(), step, 4)).sum()).backward();
    scaler.unscale_(*optimizer);
    clip_grad_norm_(model, 1.0);
    scaler.step(*optimizer, 0.01);
    scaler.update();
  }
  auto tensors = optimizer->state_dict().tensors;
  for (const auto& parameter : model.named_parameters()) {
    tensors["parameter " + parameter.name] = parameter.tensor.detach();
  }
  REQUIRE(tensors.size() == 6 * 4);
  for (const auto& [key, tensor] : tensors) {
    INFO(key);
    auto lowest = tensor.clone();
    auto highest = tensor.clone();
    group()->all_reduce(lowest, ReduceOp::Min)->wait();
    group()->all_reduce(highest, ReduceOp::Max)->wait();
    REQUIRE(torch::equal(lowest, highest));
  }
}
