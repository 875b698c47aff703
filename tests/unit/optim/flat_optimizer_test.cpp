// SPDX-License-Identifier: Apache-2.0
// Features of the flat optimizer alone: its tables, and its state in the list implementation.
// optimizer_test, _golden_test and _state_test run it too.
#include <torch/torch.h>

#include <functional>
#include <map>

#include "ddp/amp/amp.hpp"
#include "ddp/optim/ema.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "support/catch.hpp"
#include "unit/optim/optim_test_support.hpp"

using namespace optim_test;
using ddp::NamedParameters;
using ddp::OptimizerImplementation;
using ddp::OptimizerOptions;
using ddp::OptimizerType;
using ddp::StateDict;

namespace {

const ddp::StepScalars kScaledStep{.lr = 0.0078125, .inverse_scale = 0.5, .clip_factor = 0.75};

OptimizerOptions rule_of(OptimizerType type, OptimizerImplementation implementation) {
  OptimizerOptions options;
  options.type = type;
  options.momentum = 0.9;
  options.nesterov = type == OptimizerType::Sgd;
  options.trust_coefficient = 0.125;
  options.weight_decay = 0.01;
  options.groups = {{.patterns = {"*.bias"}, .lr_scale = 0.5, .weight_decay = 0.0}};
  options.implementation = implementation;
  return options;
}

// Sizes around a chunk's, a vector's and one element, with half leaves and channels_last.
NamedParameters mixed_parameters() {
  const auto leaf = [](at::IntArrayRef shape, int64_t k, at::ScalarType dtype) {
    return weights(shape, k).detach().to(dtype).requires_grad_();
  };
  return {{"conv.weight", leaf({8, 4, 3, 3}, 0, at::kFloat)
                              .detach()
                              .contiguous(at::MemoryFormat::ChannelsLast)
                              .requires_grad_()},
          {"large.weight", leaf({97, 131}, 1, at::kBFloat16)},
          {"large.bias", leaf({4099}, 2, at::kFloat)},
          {"one.bias", leaf({1}, 3, at::kHalf)}};
}

}  // namespace

// Both round in other places: a few ulp of a weight after 100 steps; the same for float32 state.
TEST_CASE("100 flat steps equal those over lists", "[optim]") {
  const auto type = GENERATE(OptimizerType::Sgd, OptimizerType::Adam, OptimizerType::AdamW,
                             OptimizerType::Lars, OptimizerType::Lamb);
  NamedParameters flat = mixed_parameters();
  NamedParameters list = mixed_parameters();
  auto ours = ddp::make_optimizer(flat, rule_of(type, OptimizerImplementation::Flat));
  auto theirs = ddp::make_optimizer(list, rule_of(type, OptimizerImplementation::List));
  run_steps(*ours, flat, 0, 100, kScaledStep);
  run_steps(*theirs, list, 0, 100, kScaledStep);
  const StateDict state = ours->state_dict();
  const StateDict expected = theirs->state_dict();
  REQUIRE(state.tensors.size() == expected.tensors.size());
  for (const auto& [key, tensor] : expected.tensors) {
    INFO(key);
    CHECK(ulps(state.tensors.at(key), tensor) <= 32.0);
    CHECK(state.tensors.at(key).strides() == tensor.strides());
  }
  for (size_t k = 0; k < flat.size(); ++k) {
    INFO(flat[k].name);
    const double spacing = flat[k].tensor.scalar_type() == at::kBFloat16 ? 65536.0
                           : flat[k].tensor.scalar_type() == at::kHalf   ? 8192.0
                                                                         : 32.0;
    CHECK(ulps(flat[k].tensor.to(at::kFloat), list[k].tensor.to(at::kFloat)) <= spacing);
  }
}

TEST_CASE("Either implementation goes on from the other's state", "[optim]") {
  const auto type = GENERATE(OptimizerType::Sgd, OptimizerType::AdamW, OptimizerType::Lamb);
  const bool to_flat = GENERATE(false, true);
  const auto from = to_flat ? OptimizerImplementation::List : OptimizerImplementation::Flat;
  const auto to = to_flat ? OptimizerImplementation::Flat : OptimizerImplementation::List;
  NamedParameters whole = mixed_parameters();
  auto uninterrupted = ddp::make_optimizer(whole, rule_of(type, from));
  run_steps(*uninterrupted, whole, 0, 5, kScaledStep);
  const StateDict saved = deep_copy(uninterrupted->state_dict());
  NamedParameters resumed;
  for (const auto& parameter : whole) {
    resumed.push_back({parameter.name, parameter.tensor.detach().clone().requires_grad_()});
  }
  auto optimizer = ddp::make_optimizer(resumed, rule_of(type, to));
  optimizer->load_state_dict(saved);
  const StateDict loaded = optimizer->state_dict();
  REQUIRE(loaded.tensors.size() == saved.tensors.size());
  for (const auto& [key, tensor] : saved.tensors) {
    INFO(key);
    CHECK(at::equal(loaded.tensors.at(key), tensor));
  }
  run_steps(*uninterrupted, whole, 5, 8, kScaledStep);
  run_steps(*optimizer, resumed, 5, 8, kScaledStep);
  const StateDict end = optimizer->state_dict();
  for (const auto& [key, tensor] : uninterrupted->state_dict().tensors) {
    INFO(key);
    CHECK(ulps(end.tensors.at(key), tensor) <= 8.0);
  }
}

TEST_CASE("A flat step leaves gradients alone and follows parameters that move", "[optim]") {
  NamedParameters parameters = mixed_parameters();
  NamedParameters still = mixed_parameters();
  const auto options = rule_of(OptimizerType::Sgd, OptimizerImplementation::Flat);
  auto optimizer = ddp::make_optimizer(parameters, options);
  auto reference = ddp::make_optimizer(still, options);
  run_steps(*optimizer, parameters, 0, 2, kScaledStep);
  run_steps(*reference, still, 0, 2, kScaledStep);
  CHECK(at::equal(parameters[1].tensor.grad(), gradient({97, 131}, 1, 1)));
  const at::Tensor old = parameters[2].tensor.detach();
  parameters[2].tensor.set_data(old.clone());
  const at::Tensor before = old.clone();
  run_steps(*optimizer, parameters, 2, 4, kScaledStep);
  run_steps(*reference, still, 2, 4, kScaledStep);
  CHECK(at::equal(old, before));
  for (size_t k = 0; k < still.size(); ++k) {
    CHECK(at::equal(parameters[k].tensor.detach(), still[k].tensor.detach()));
  }
  parameters[2].tensor.set_data(old.to(at::kDouble));
  parameters[2].tensor.mutable_grad() = at::ones({4099}, at::kDouble);
  CHECK(contains(message_of<ddp::SettingsError>([&] { optimizer->step(0.1); }),
                 "large.bias was replaced after the optimizer was made"));
}

TEST_CASE("A master follows values that came with other memory", "[optim]") {
  const auto implementation =
      GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  NamedParameters parameters = mixed_parameters();
  NamedParameters still = mixed_parameters();
  const auto options = rule_of(OptimizerType::Adam, implementation);
  auto optimizer = ddp::make_optimizer(parameters, options);
  auto reference = ddp::make_optimizer(still, options);
  run_steps(*optimizer, parameters, 0, 2, kScaledStep);
  run_steps(*reference, still, 0, 2, kScaledStep);
  auto& half = parameters[1].tensor;
  half.set_data(half.detach().clone());  // equal values: the master keeps its bits
  run_steps(*optimizer, parameters, 2, 4, kScaledStep);
  run_steps(*reference, still, 2, 4, kScaledStep);
  CHECK(at::equal(half.detach(), still[1].tensor.detach()));
  half.set_data(at::full_like(half.detach(), 3.0));
  half.mutable_grad() = at::ones_like(half.detach());
  optimizer->step(0.0);
  CHECK(at::equal(half.detach(), at::full_like(half.detach(), 3.0)));
  half.set_data(at::full_like(half.detach(), 4.0));
  auto saved = optimizer->state_dict();  // between two steps
  for (auto& [name, tensor] : saved.tensors) {
    tensor = tensor.clone();
  }
  CHECK(at::equal(saved.tensors.at("state.large.weight.master"),
                  at::full_like(half.detach(), 4.0, at::kFloat)));
  half.mutable_grad() = at::ones_like(half.detach());
  optimizer->step(0.0);
  half.set_data(half.detach().as_strided(half.sizes(), half.strides()));  // the same address
  {
    const at::NoGradGuard no_grad;
    half.fill_(6.0);
  }
  half.mutable_grad() = at::ones_like(half.detach());
  optimizer->step(0.0);
  CHECK(at::equal(half.detach(), at::full_like(half.detach(), 6.0)));
  half.set_data(half.detach().clone());
  optimizer->load_state_dict(saved);  // with masters of 4
  half.mutable_grad() = at::ones_like(half.detach());
  optimizer->step(0.0);
  CHECK(at::equal(half.detach(), at::full_like(half.detach(), 6.0)));
  {
    const at::NoGradGuard no_grad;
    half.fill_(5.0);
  }
  half.mutable_grad() = at::ones_like(half.detach());
  optimizer->step(0.0);
  CHECK(at::equal(half.detach(), at::full_like(half.detach(), 5.0)));
}

TEST_CASE("The same memory in another dtype is followed, in another layout refused", "[optim]") {
  NamedParameters parameters = {{"w", at::ones({4, 6}, at::kBFloat16).requires_grad_()}};
  auto& leaf = parameters[0].tensor;
  auto optimizer =
      ddp::make_optimizer(parameters, {.implementation = OptimizerImplementation::Flat});
  const auto step = [&] {
    leaf.mutable_grad() = at::ones_like(leaf.detach());
    optimizer->step(0.125);
  };
  step();
  leaf.detach().fill_(1.0);
  leaf.set_data(leaf.detach().view(at::kHalf));  // 1.0 in bfloat16 has the bits of 1.875
  step();
  CHECK(at::equal(leaf.detach(), at::full({4, 6}, 1.75, at::kHalf)));
  leaf.set_data(leaf.detach().view({6, 4}));
  CHECK(contains(message_of<ddp::SettingsError>(step), "parameter w was replaced"));
}

namespace {

enum class Kind { List, Flat, Wrapped };

struct FullStep {
  explicit FullStep(Kind kind) {
    const auto options =
        rule_of(OptimizerType::Adam,
                kind == Kind::List ? OptimizerImplementation::List : OptimizerImplementation::Flat);
    std::vector<at::Tensor> tensors;
    for (const auto& parameter : parameters) {
      tensors.push_back(parameter.tensor);
    }
    optimizer = kind == Kind::Wrapped
                    ? ddp::wrap_optimizer(std::make_shared<torch::optim::Adam>(tensors), parameters)
                    : ddp::make_optimizer(parameters, options);
  }
  void replace(int turn, int now) {
    for (auto& parameter : parameters) {
      if (turn == now) {
        parameter.tensor.set_data(parameter.tensor.detach().clone());
      }
    }
  }
  void step(int64_t index, int turn) {
    scaler.scale(at::ones({}));
    set_gradients(parameters, index);
    replace(turn, 0);
    scaler.unscale_(*optimizer);
    replace(turn, 1);
    ddp::clip_grad_norm_(parameters, 0.5);
    replace(turn, 2);
    scaler.step(*optimizer, 0.0625);
    scaler.update();
    replace(turn, 3);
    ema.update();
    const auto swap = ema.swap_in();
    replace(turn, 4);
  }
  static ddp::AmpOptions amp() {
    ddp::AmpOptions options;
    options.grad_scaling = ddp::GradScaling::On;
    options.init_scale = 4;
    return options;
  }
  NamedParameters parameters{{"a", weights({8, 4}, 0)}, {"b.bias", weights({33}, 1)}};
  std::unique_ptr<ddp::Optimizer> optimizer;
  ddp::GradScaler scaler{amp()};
  ddp::Ema ema{parameters, {.decay = 0.75}};
};

}  // namespace

TEST_CASE("Memory replaced between any two calls of a step changes no number", "[optim]") {
  const auto kind = GENERATE(Kind::List, Kind::Flat, Kind::Wrapped);
  FullStep moved(kind);
  FullStep still(kind);
  for (int step = 0; step < 10; ++step) {
    CAPTURE(kind, step);
    moved.step(step, step % 5);
    still.step(step, -1);
    for (size_t i = 0; i < 2; ++i) {
      REQUIRE(at::equal(moved.parameters[i].tensor, still.parameters[i].tensor));
      REQUIRE(at::equal(moved.ema.averages()[i].tensor, still.ema.averages()[i].tensor));
    }
  }
}

TEST_CASE("A parameter that its state does not fit any more is refused", "[optim]") {
  const auto implementation =
      GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  const auto type = GENERATE(OptimizerType::Sgd, OptimizerType::Adam, OptimizerType::Lamb);
  const double momentum = GENERATE(0.0, 0.9);
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);
  const std::map<std::string, std::function<at::Tensor(const at::Tensor&)>> replacements{
      {"order", [](const at::Tensor& w) { return w.contiguous(at::MemoryFormat::ChannelsLast); }},
      {"holes",
       [](const at::Tensor& w) {
         return at::cat({w, w}, 3).narrow(3, 1, w.size(3));
       }},
      {"shape",
       [](const at::Tensor& w) {
         return at::cat({w, w}, 0);
       }},
      {"ones", [](const at::Tensor& w) { return w.narrow(0, 0, 1).clone(); }},
      {"dtype", [](const at::Tensor& w) { return w.to(at::kDouble); }},
      {"half", [](const at::Tensor& w) {
         return w.to(w.scalar_type() == at::kFloat ? at::kBFloat16 : at::kFloat);
       }}};
  for (const auto& [name, replace] : replacements) {
    CAPTURE(implementation, type, momentum, dtype, name);
    NamedParameters parameters{{"w", weights({3, 4, 5, 6}, 0).detach().to(dtype).requires_grad_()}};
    auto& leaf = parameters[0].tensor;
    ddp::OptimizerOptions options = as({.type = type}, implementation);
    options.momentum = momentum;
    auto optimizer = ddp::make_optimizer(parameters, options);
    const auto step = [&] {
      leaf.mutable_grad() = at::ones_like(leaf.detach());
      optimizer->step(0.125);
    };
    step();
    leaf.mutable_grad() = at::Tensor();
    leaf.set_data(replace(leaf.detach()));
    const at::Tensor still = leaf.detach().clone();
    CHECK(contains(message_of<ddp::SettingsError>(step), "parameter w was replaced"));
    CHECK(at::equal(leaf.detach(), still));
    CHECK(contains(message_of<ddp::SettingsError>([&] { optimizer->state_dict(); }),
                   "parameter w was replaced"));
  }
}

TEST_CASE("A parameter may get another memory order before its first update", "[optim]") {
  const auto implementation =
      GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  NamedParameters parameters{{"w.bias", weights({3, 4, 5, 6}, 0)}};
  NamedParameters turned{{"w.bias", weights({3, 4, 5, 6}, 0)}};
  const auto options = rule_of(OptimizerType::Adam, implementation);
  auto optimizer = ddp::make_optimizer(parameters, options);
  auto reference = ddp::make_optimizer(turned, options);
  auto& leaf = turned[0].tensor;
  leaf.set_data(leaf.detach().contiguous(at::MemoryFormat::ChannelsLast));
  run_steps(*optimizer, parameters, 0, 3, kScaledStep);
  run_steps(*reference, turned, 0, 3, kScaledStep);
  CHECK(at::equal(parameters[0].tensor.detach(), leaf.detach()));
}

TEST_CASE("A parameter converted between make_optimizer and the first step is told", "[optim]") {
  const auto implementation =
      GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  const auto before = GENERATE(at::kFloat, at::kBFloat16);
  const auto after = before == at::kFloat ? at::kBFloat16 : at::kFloat;
  NamedParameters parameters = {{"w.bias", weights({40}, 0).detach().to(before).requires_grad_()}};
  auto optimizer = ddp::make_optimizer(parameters, rule_of(OptimizerType::Lars, implementation));
  const bool loads = GENERATE(false, true);
  parameters[0].tensor.set_data(parameters[0].tensor.detach().to(after));
  parameters[0].tensor.mutable_grad() = at::ones({40}, after);
  const at::Tensor still = parameters[0].tensor.detach().clone();
  ddp::StateDict empty;
  empty.values["type"] = std::string("lars");
  CHECK(contains(message_of<ddp::SettingsError>(
                     [&] { loads ? optimizer->load_state_dict(empty) : optimizer->step(0.1); }),
                 "parameter w.bias was replaced after the optimizer was made"));
  CHECK(at::equal(parameters[0].tensor.detach(), still));
}

TEST_CASE("More parameters than one table of gradients holds", "[optim]") {
  NamedParameters flat;
  NamedParameters list;
  for (int64_t k = 0; k < 901; ++k) {
    const std::string name = ddp::concat("p", k);
    flat.push_back({name, weights({1 + k % 3}, k)});
    list.push_back({name, weights({1 + k % 3}, k)});
  }
  OptimizerOptions options;
  options.type = OptimizerType::AdamW;
  options.implementation = OptimizerImplementation::Flat;
  auto ours = ddp::make_optimizer(flat, options);
  options.implementation = OptimizerImplementation::List;
  auto theirs = ddp::make_optimizer(list, options);
  for (int64_t step = 0; step < 4; ++step) {
    set_gradients(flat, step);
    set_gradients(list, step);
    flat[static_cast<size_t>(400 + step)].tensor.mutable_grad().reset();
    list[static_cast<size_t>(400 + step)].tensor.mutable_grad().reset();
    ours->step(0.0625);
    theirs->step(0.0625);
  }
  for (size_t k = 0; k < flat.size(); ++k) {
    REQUIRE(ulps(flat[k].tensor, list[k].tensor) <= 8.0);
  }
}

TEST_CASE("What cannot be flat is refused with the reason, and auto takes the list", "[optim]") {
  OptimizerOptions options;
  options.implementation = OptimizerImplementation::Flat;
  const auto refused = [&](const NamedParameters& parameters) {
    return message_of<ddp::SettingsError>([&] { ddp::make_optimizer(parameters, options); });
  };
  const NamedParameters doubles{{"w", at::ones({2}, at::kDouble).requires_grad_()}};
  CHECK(contains(refused(doubles), "parameter w is of dtype Double"));
  CHECK(contains(refused({{"w", at::ones({4, 4}).narrow(1, 0, 2)}}), "w has holes"));
  CHECK(contains(refused({}), "no parameters"));
  options.momentum = 0.5;
  options.dampening = 0.5;
  CHECK(contains(refused({{"w", at::ones({2})}}), "optimizer.dampening"));
  options.implementation = OptimizerImplementation::Auto;
  CHECK_NOTHROW(ddp::make_optimizer(doubles, options));
}
