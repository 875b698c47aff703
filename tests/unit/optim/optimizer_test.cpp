// SPDX-License-Identifier: Apache-2.0
#include "ddp/optim/make_optimizer.hpp"

#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include "support/catch.hpp"
#include "unit/optim/optim_test_support.hpp"

using namespace optim_test;
using ddp::NamedParameters;
using ddp::OptimizerOptions;
using ddp::OptimizerType;

namespace {

OptimizerOptions sgd(double momentum = 0.0) {
  OptimizerOptions options;
  options.momentum = momentum;
  return options;
}

OptimizerOptions adamw() {
  OptimizerOptions options;
  options.type = OptimizerType::AdamW;
  options.weight_decay = 0.05;
  return options;
}

std::vector<OptimizerOptions> every_rule() {
  OptimizerOptions adam = adamw();
  adam.type = OptimizerType::Adam;
  OptimizerOptions dampened = sgd(0.5);
  dampened.dampening = 0.25;
  OptimizerOptions lars = sgd(0.9);
  lars.type = OptimizerType::Lars;
  lars.weight_decay = 0.05;
  OptimizerOptions lamb = adamw();
  lamb.type = OptimizerType::Lamb;
  std::vector<OptimizerOptions> rules{sgd(), sgd(0.9), dampened, adam, adamw(), lars, lamb};
  for (OptimizerOptions options : {sgd(), sgd(0.9), adam, adamw(), lars, lamb}) {
    options.implementation = ddp::OptimizerImplementation::Flat;
    rules.push_back(options);
  }
  return rules;
}

NamedParameters three_parameters() {
  return {{"a.weight", weights({5, 3}, 0)},
          {"a.bias", weights({5}, 1)},
          {"b.weight", weights({2, 5}, 2)}};
}

std::vector<at::Tensor> copies(const NamedParameters& parameters) {
  std::vector<at::Tensor> out;
  for (const auto& parameter : parameters) {
    out.push_back(parameter.tensor.detach().clone());
  }
  return out;
}

bool all_equal(const NamedParameters& parameters, const std::vector<at::Tensor>& expected) {
  bool equal = parameters.size() == expected.size();
  for (size_t i = 0; equal && i < expected.size(); ++i) {
    equal = at::equal(parameters[i].tensor.detach(), expected[i]);
  }
  return equal;
}

}  // namespace

TEST_CASE("Plain SGD on exact numbers gives exact weights", "[optim]") {
  NamedParameters parameters{{"w", at::tensor({1.0F, -2.0F, 0.5F}).requires_grad_()}};
  auto optimizer = ddp::make_optimizer(parameters, sgd(0.5));
  for (int i = 0; i < 2; ++i) {
    parameters[0].tensor.mutable_grad() = at::tensor({1.0F, 2.0F, -4.0F});
    optimizer->step(0.25);
  }
  // buffers: g, then 1.5 g; weights move by 0.25 * (1 + 1.5) g
  CHECK(at::equal(parameters[0].tensor.detach(), at::tensor({0.375F, -3.25F, 3.0F})));
  CHECK(at::equal(optimizer->state_dict().tensors.at("state.w.momentum_buffer"),
                  at::tensor({1.5F, 3.0F, -6.0F})));
}

TEST_CASE("100 steps of every rule equal torch::optim", "[optim]") {
  constexpr int64_t kUpdates = 100;
  NamedParameters ours = three_parameters();
  NamedParameters theirs = three_parameters();
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : theirs) {
    tensors.push_back(parameter.tensor);
  }
  const auto run = [&](OptimizerOptions options, torch::optim::Optimizer& reference) {
    options.implementation =
        GENERATE(ddp::OptimizerImplementation::List, ddp::OptimizerImplementation::Flat);
    auto optimizer = ddp::make_optimizer(ours, options);
    for (int64_t step = 0; step < kUpdates; ++step) {
      set_gradients(ours, step);
      set_gradients(theirs, step);
      optimizer->step(0.0625);
      reference.step();
    }
    for (size_t k = 0; k < ours.size(); ++k) {
      INFO(ours[k].name);
      CHECK(ulps(ours[k].tensor, theirs[k].tensor) <= torch_ulps(kUpdates));
    }
  };
  SECTION("SGD with Nesterov momentum") {
    OptimizerOptions options = sgd(0.9);
    options.nesterov = true;
    options.weight_decay = 1e-3;
    torch::optim::SGD reference(
        tensors, torch::optim::SGDOptions(0.0625).momentum(0.9).nesterov(true).weight_decay(1e-3));
    run(options, reference);
  }
  SECTION("Adam") {
    OptimizerOptions options = adamw();
    options.type = OptimizerType::Adam;
    torch::optim::Adam reference(tensors, torch::optim::AdamOptions(0.0625).weight_decay(0.05));
    run(options, reference);
  }
  SECTION("AdamW") {
    torch::optim::AdamW reference(tensors, torch::optim::AdamWOptions(0.0625).weight_decay(0.05));
    run(adamw(), reference);
  }
}

// PyTorch rounds 1 - lr * weight_decay to float32 and multiplies by it in every update.
TEST_CASE("At small learning rates flat AdamW is no farther from float64 than PyTorch", "[optim]") {
  const at::Tensor start = 4 * weights({101}, 0).detach();
  const auto run_torch = [&](at::ScalarType dtype) {
    const at::Tensor weight = start.to(dtype, false, /*copy=*/true).requires_grad_();
    torch::optim::AdamW optimizer({weight}, torch::optim::AdamWOptions(1e-3).weight_decay(0.05));
    for (int64_t step = 0; step < 100; ++step) {
      weight.mutable_grad() = gradient({101}, 0, step).to(dtype);
      optimizer.step();
    }
    return weight.detach();
  };
  NamedParameters parameters{{"w", start.clone().requires_grad_()}};
  OptimizerOptions options = adamw();
  options.implementation = ddp::OptimizerImplementation::Flat;
  auto optimizer = ddp::make_optimizer(parameters, options);
  run_steps(*optimizer, parameters, 0, 100, {.lr = 1e-3});
  const at::Tensor exact = run_torch(at::kDouble);
  const at::Tensor theirs = run_torch(at::kFloat);
  CHECK(ulps(parameters[0].tensor, theirs) <= 50.0);
  CHECK(ulps(parameters[0].tensor, exact) <= ulps(theirs, exact));
}

TEST_CASE("Float64 weights take the learning rate in float64", "[optim]") {
  NamedParameters parameters{{"w", at::ones({3}, at::kDouble).requires_grad_()},
                             {"v", at::ones({3}, at::kDouble).requires_grad_()}};
  OptimizerOptions options;
  options.groups = {{.patterns = {"v"}, .lr_scale = 0.1}};
  auto optimizer = ddp::make_optimizer(parameters, options);
  for (const auto& parameter : parameters) {
    parameter.tensor.mutable_grad() = at::ones({3}, at::kDouble);
  }
  optimizer->step(0.1);
  CHECK(at::equal(parameters[0].tensor.detach(), at::full({3}, 1.0 - 0.1, at::kDouble)));
  CHECK(at::equal(parameters[1].tensor.detach(), at::full({3}, 1.0 - 0.1 * 0.1, at::kDouble)));
}

TEST_CASE("Float64 gradients are scaled by the host's factors in float64", "[optim]") {
  const bool wraps = GENERATE(false, true);
  const auto weight = at::zeros({3}, at::kDouble).requires_grad_();
  const NamedParameters parameters{{"w", weight}};
  const auto optimizer =
      wraps ? ddp::wrap_optimizer(std::make_shared<torch::optim::SGD>(std::vector{weight}, 1.0),
                                  parameters)
            : ddp::make_optimizer(parameters, sgd());
  weight.mutable_grad() = at::ones({3}, at::kDouble);
  const ddp::GradientScan scan = optimizer->scan_gradients(0.1, std::sqrt(3.0) * 0.05);
  const double norm = std::sqrt(3.0) * 0.1;
  CHECK(scan.clip_factor.item<double>() ==
        Approx(std::sqrt(3.0) * 0.05 / (norm + 1e-6)).epsilon(1e-12));
  optimizer->step({.lr = 1.0, .inverse_scale = 0.1, .clip_factor = 0.3});
  CHECK(at::allclose(weight.detach(), at::full({3}, -0.1 * 0.3, at::kDouble), 1e-15, 0));
}

TEST_CASE("Parameters without a gradient are skipped, state too", "[optim]") {
  for (const OptimizerOptions& options : every_rule()) {
    NamedParameters parameters = three_parameters();
    auto optimizer = ddp::make_optimizer(parameters, options);
    set_gradients(parameters, 0);
    parameters[1].tensor.mutable_grad().reset();
    const std::vector<at::Tensor> before = copies(parameters);
    optimizer->step(0.125);
    CHECK(at::equal(parameters[1].tensor, before[1]));
    CHECK_FALSE(at::equal(parameters[0].tensor, before[0]));
    for (const auto& [key, tensor] : optimizer->state_dict().tensors) {
      CHECK_FALSE(contains(key.text(), "a.bias"));
    }
  }
}

TEST_CASE("found_inf skips the whole step, on the host and on the device", "[optim]") {
  const std::vector<OptimizerOptions> rules = every_rule();
  for (size_t rule = 0; rule < rules.size(); ++rule) {
    INFO("rule " << rule);
    NamedParameters skipping = three_parameters();
    NamedParameters plain = three_parameters();
    auto optimizer = ddp::make_optimizer(skipping, rules[rule]);
    auto reference = ddp::make_optimizer(plain, rules[rule]);
    for (int64_t step = 0; step < 6; ++step) {
      // The first step is skipped too: it must not create state.
      const bool skip = step == 0 || step == 3;
      set_gradients(skipping, step);
      const std::vector<at::Tensor> before = copies(skipping);
      const ddp::StepScalar found_inf = step == 0 || step % 2 == 1
                                            ? ddp::StepScalar(at::scalar_tensor(skip ? 1.0F : 0.0F))
                                            : ddp::StepScalar(skip ? 1.0 : 0.0);
      optimizer->step({.lr = 0.0625, .found_inf = found_inf});
      if (skip) {
        CHECK(all_equal(skipping, before));
      } else {
        set_gradients(plain, step);
        reference->step(0.0625);
        CHECK(all_equal(skipping, copies(plain)));
      }
    }
    const ddp::StateDict state = optimizer->state_dict();
    const ddp::StateDict expected = reference->state_dict();
    REQUIRE(state.tensors.size() == expected.tensors.size());
    for (const auto& [key, tensor] : expected.tensors) {
      INFO(key);
      CHECK(at::equal(state.tensors.at(key), tensor));
    }
  }
}

TEST_CASE("inverse_scale and clip_factor multiply gradients", "[optim]") {
  for (const OptimizerOptions& options : every_rule()) {
    NamedParameters scaled = three_parameters();
    NamedParameters plain = three_parameters();
    auto optimizer = ddp::make_optimizer(scaled, options);
    auto reference = ddp::make_optimizer(plain, options);
    for (int64_t step = 0; step < 5; ++step) {
      set_gradients(scaled, step);
      set_gradients(plain, step);
      for (const auto& parameter : scaled) {
        parameter.tensor.mutable_grad().mul_(
            64.0);  // undone by 1/16 * 1/4: powers of two are exact
      }
      optimizer->step(
          {.lr = 0.0625, .inverse_scale = at::scalar_tensor(0.0625F), .clip_factor = 0.25});
      reference->step(0.0625);
      CHECK(all_equal(scaled, copies(plain)));
    }
  }
}

TEST_CASE("Half leaves keep float32 masters", "[optim]") {
  const at::ScalarType dtype = GENERATE(at::kBFloat16, at::kHalf);
  const bool half_gradients = GENERATE(false, true);
  for (const OptimizerOptions& options : every_rule()) {
    NamedParameters full = three_parameters();
    NamedParameters half;
    for (const auto& parameter : full) {
      // Both start from numbers that the half type represents exactly.
      const at::Tensor leaf = parameter.tensor.detach().to(dtype);
      parameter.tensor.detach().copy_(leaf);
      half.push_back({parameter.name, leaf.clone().requires_grad_()});
    }
    auto optimizer = ddp::make_optimizer(half, options);
    auto reference = ddp::make_optimizer(full, options);
    for (int64_t step = 0; step < 40; ++step) {
      for (size_t k = 0; k < full.size(); ++k) {
        const at::Tensor grad = gradient(full[k].tensor.sizes(), static_cast<int64_t>(k), step)
                                    .to(dtype)
                                    .to(at::kFloat);
        full[k].tensor.mutable_grad() = grad;
        half[k].tensor.mutable_grad() = half_gradients ? grad.to(dtype) : grad;
      }
      // Steps this small on the leaf itself would be lost to rounding.
      optimizer->step(0.0001220703125);
      reference->step(0.0001220703125);
    }
    const ddp::StateDict state = optimizer->state_dict();
    for (size_t k = 0; k < full.size(); ++k) {
      CHECK(at::equal(state.tensors.at("state." + full[k].name + ".master"),
                      full[k].tensor.detach()));
      CHECK(half[k].tensor.scalar_type() == dtype);
      CHECK(at::equal(half[k].tensor.detach(), full[k].tensor.detach().to(dtype)));
    }
  }
}

TEST_CASE("Leaves with holes in memory are stepped rightly", "[optim]") {
  const at::Tensor storage = at::zeros({5, 8});
  NamedParameters sliced{
      {"w", storage.narrow(1, 0, 3).copy_(weights({5, 3}, 0).detach()).detach().requires_grad_()}};
  NamedParameters plain{{"w", weights({5, 3}, 0)}};
  auto optimizer = ddp::make_optimizer(sliced, sgd(0.9));
  auto reference = ddp::make_optimizer(plain, sgd(0.9));
  for (int64_t step = 0; step < 3; ++step) {
    set_gradients(sliced, step);
    set_gradients(plain, step);
    optimizer->step(0.125);
    reference->step(0.125);
  }
  CHECK(at::equal(sliced[0].tensor.detach(), plain[0].tensor.detach()));
  CHECK(storage.narrow(1, 3, 5).eq(0).all().item<bool>());
}

TEST_CASE("Groups have their own learning rate and weight decay", "[optim]") {
  NamedParameters parameters = three_parameters();
  OptimizerOptions options;
  options.weight_decay = 0.5;
  options.decay_norm_and_bias = false;
  options.groups = {{.patterns = {"b.*"}, .lr_scale = 0.25, .weight_decay = 0.0}};
  options.implementation =
      GENERATE(ddp::OptimizerImplementation::List, ddp::OptimizerImplementation::Flat);
  auto optimizer = ddp::make_optimizer(parameters, options);
  const std::vector<at::Tensor> before = copies(parameters);
  for (const auto& parameter : parameters) {
    parameter.tensor.mutable_grad() = at::ones_like(parameter.tensor);
  }
  const bool on_device = GENERATE(false, true);
  const auto lr = on_device ? ddp::StepScalar(at::scalar_tensor(0.5F)) : ddp::StepScalar(0.5);
  optimizer->step({.lr = lr});
  CHECK(at::equal(parameters[0].tensor.detach(), before[0] - 0.5 * (1.0 + 0.5 * before[0])));
  CHECK(at::equal(parameters[1].tensor.detach(), before[1] - 0.5));    // a bias: no decay
  CHECK(at::equal(parameters[2].tensor.detach(), before[2] - 0.125));  // its own group
}

TEST_CASE("A shared weight is stepped once", "[optim]") {
  const at::Tensor shared = at::ones({2}).requires_grad_();
  auto optimizer = ddp::make_optimizer({{"embed", shared}, {"head", shared}}, sgd());
  shared.mutable_grad() = at::ones({2});
  optimizer->step(0.25);
  CHECK(at::equal(shared.detach(), at::full({2}, 0.75F)));
  CHECK(optimizer->named_parameters().size() == 1);
}

TEST_CASE("zero_grad leaves gradients undefined", "[optim]") {
  NamedParameters parameters = three_parameters();
  auto optimizer = ddp::make_optimizer(parameters, sgd());
  set_gradients(parameters, 0);
  CHECK(optimizer->gradients().size() == 3);
  optimizer->zero_grad();
  CHECK(optimizer->gradients().empty());
  CHECK_FALSE(parameters[0].tensor.grad().defined());
}

TEST_CASE("Wrong parameters and steps are refused by name", "[optim]") {
  const at::Tensor weight = weights({2, 2}, 0);
  const auto make = [](const NamedParameters& parameters, const OptimizerOptions& options) {
    return message_of<ddp::SettingsError>([&] { ddp::make_optimizer(parameters, options); });
  };
  CHECK(contains(make({{"w", weight}, {"w", weights({1}, 1)}}, {}), "two parameters are named w"));
  CHECK(contains(make({{"ids", at::zeros({2}, at::kLong)}}, {}), "ids"));
  OptimizerOptions options;
  options.groups = {{.patterns = {"head.*"}, .lr_scale = 0.1, .weight_decay = {}}};
  CHECK(contains(make({{"w", weight}}, options), "head.*"));

  auto optimizer = ddp::make_optimizer({{"w", weight}}, {});
  weight.mutable_grad() = at::ones({2, 2});
  CHECK(
      contains(message_of([&] { optimizer->step(ddp::StepScalars{}); }), "needs a learning rate"));
  CHECK(contains(message_of([&] { optimizer->step(); }), "fix: step(0.1)"));
  weight.mutable_grad() = at::ones({2, 2}).to_sparse();
  CHECK(contains(message_of([&] { optimizer->step(0.1); }), "gradient of w is sparse"));
}

TEST_CASE("make_optimizer returns a Stateful object", "[optim]") {
  const NamedParameters parameters = three_parameters();
  auto optimizer = ddp::make_optimizer(parameters, sgd());
  const std::vector<std::reference_wrapper<ddp::Stateful>> objects{*optimizer};
  CHECK(objects[0].get().state_name() == "optimizer");
  set_gradients(parameters, 0);
  const std::vector<at::Tensor> before = copies(parameters);
  const std::unique_ptr<ddp::Optimizer> moved = std::move(optimizer);
  moved->step(0.125);
  CHECK_FALSE(all_equal(parameters, before));
  CHECK(moved->capturable());
}

TEST_CASE("A backward through weights that a step moved is refused as in PyTorch", "[optim]") {
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);
  const auto check = [&](const auto& make) {
    const at::Tensor moved = weights({5, 3}, 0).detach().to(dtype).requires_grad_();
    const at::Tensor unused = weights({5}, 1).detach().to(dtype).requires_grad_();
    const auto step = make(NamedParameters{{"moved", moved}, {"unused", unused}});
    for (int i = 0; i < 2; ++i) {  // the first step makes the state
      const at::Tensor old = (moved * moved).sum();
      const at::Tensor still = (unused * unused).sum();
      moved.mutable_grad() = at::ones_like(moved);
      step();
      CHECK(contains(message_of([&] { old.backward(); }), "modified by an inplace operation"));
      still.backward();
      unused.mutable_grad().reset();
    }
  };
  for (const OptimizerOptions& options : every_rule()) {
    CAPTURE(static_cast<int>(options.type), static_cast<int>(options.implementation));
    check([&](const NamedParameters& parameters) {
      return [optimizer = std::shared_ptr(ddp::make_optimizer(parameters, options))] {
        optimizer->step({.lr = 0.5, .inverse_scale = 0.5, .found_inf = at::zeros({})});
      };
    });
  }
  check([](const NamedParameters& parameters) {
    auto sgd = std::make_shared<torch::optim::SGD>(
        std::vector<at::Tensor>{parameters[0].tensor, parameters[1].tensor},
        torch::optim::SGDOptions(0.5));
    return [optimizer = std::shared_ptr(ddp::wrap_optimizer(std::move(sgd), parameters))] {
      optimizer->step(0.5);
    };
  });
}
