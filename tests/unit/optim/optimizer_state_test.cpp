// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

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

const ddp::StepScalars kStateStep{.lr = 0.001953125};

OptimizerOptions options_of(
    OptimizerType type, OptimizerImplementation implementation = OptimizerImplementation::List) {
  OptimizerOptions options;
  options.implementation = implementation;
  options.type = type;
  options.momentum = 0.9;
  options.weight_decay = 0.01;
  options.amsgrad = true;
  return options;
}

NamedParameters float_and_half() {
  return {{"w", weights({3, 4}, 0)},
          {"half", weights({6}, 1).detach().to(at::kBFloat16).requires_grad_()}};
}

}  // namespace

TEST_CASE("A resumed optimizer goes on bit for bit", "[optim]") {
  const auto type = GENERATE(OptimizerType::Sgd, OptimizerType::Adam, OptimizerType::AdamW,
                             OptimizerType::Lars, OptimizerType::Lamb);
  const auto implementation =
      GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  NamedParameters whole = float_and_half();
  auto uninterrupted = ddp::make_optimizer(whole, options_of(type, implementation));
  run_steps(*uninterrupted, whole, 0, 5, kStateStep);

  // Contents of a checkpoint: weights and the optimizer's state.
  const StateDict saved = deep_copy(uninterrupted->state_dict());
  NamedParameters resumed;
  for (const auto& parameter : whole) {
    resumed.push_back({parameter.name, parameter.tensor.detach().clone().requires_grad_()});
  }
  run_steps(*uninterrupted, whole, 5, 9, kStateStep);

  auto optimizer = ddp::make_optimizer(resumed, options_of(type, implementation));
  const bool into_used = GENERATE(false, true);
  if (into_used) {  // state of other steps gets overwritten
    std::vector<at::Tensor> before{resumed[0].tensor.detach().clone(),
                                   resumed[1].tensor.detach().clone()};
    run_steps(*optimizer, resumed, 20, 22, kStateStep);
    resumed[0].tensor.detach().copy_(before[0]);
    resumed[1].tensor.detach().copy_(before[1]);
  }
  optimizer->load_state_dict(saved);
  run_steps(*optimizer, resumed, 5, 9, kStateStep);
  for (size_t k = 0; k < whole.size(); ++k) {
    CHECK(at::equal(resumed[k].tensor.detach(), whole[k].tensor.detach()));
  }
  const StateDict end = optimizer->state_dict();
  for (const auto& [key, tensor] : uninterrupted->state_dict().tensors) {
    INFO(key);
    REQUIRE(end.tensors.count(key) == 1);
    CHECK(at::equal(end.tensors.at(key), tensor));
  }
}

TEST_CASE("State has PyTorch's slots under the parameters' names", "[optim]") {
  NamedParameters parameters = float_and_half();
  const auto implementation =
      GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  auto adamw = ddp::make_optimizer(parameters, options_of(OptimizerType::AdamW, implementation));
  CHECK(adamw->state_name() == "optimizer");
  CHECK(adamw->state_dict().tensors.empty());  // as in PyTorch, before the first step
  run_steps(*adamw, parameters, 0, 3, kStateStep);
  std::vector<std::string> keys;
  const StateDict state = adamw->state_dict();
  for (const auto& [key, tensor] : state.tensors) {
    keys.push_back(key.text());
  }
  CHECK(keys == std::vector<std::string>{"state.half.exp_avg", "state.half.exp_avg_sq",
                                         "state.half.master", "state.half.max_exp_avg_sq",
                                         "state.half.step", "state.w.exp_avg", "state.w.exp_avg_sq",
                                         "state.w.max_exp_avg_sq", "state.w.step"});
  CHECK(state.tensors.at("state.w.step").item<float>() == 3.0F);
  CHECK(state.tensors.at("state.w.step").dim() == 0);
  CHECK(state.tensors.at("state.half.exp_avg").scalar_type() == at::kFloat);
  CHECK(std::get<std::string>(state.values.at("type")) == "adamw");
}

TEST_CASE("State saved before the first step takes state away", "[optim]") {
  const auto implementation =
      GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  NamedParameters parameters = float_and_half();
  auto optimizer =
      ddp::make_optimizer(parameters, options_of(OptimizerType::AdamW, implementation));
  const StateDict empty = optimizer->state_dict();
  run_steps(*optimizer, parameters, 0, 2, kStateStep);
  CHECK(optimizer->capture_version() == 0);
  optimizer->load_state_dict(empty);
  CHECK(optimizer->capture_version() == 1);  // its step's graphs are re-captured
  CHECK(optimizer->state_dict().tensors.empty());
  run_steps(*optimizer, parameters, 0, 1, kStateStep);
  CHECK(optimizer->state_dict().tensors.at("state.w.step").item<float>() == 1.0F);
}

TEST_CASE("State that does not fit is refused by key and changes nothing", "[optim]") {
  const auto implementation =
      GENERATE(OptimizerImplementation::List, OptimizerImplementation::Flat);
  NamedParameters parameters = float_and_half();
  auto optimizer =
      ddp::make_optimizer(parameters, options_of(OptimizerType::AdamW, implementation));
  run_steps(*optimizer, parameters, 0, 2, kStateStep);
  const StateDict good = deep_copy(optimizer->state_dict());
  const auto refused = [&](const StateDict& state) {
    const std::string message =
        message_of<ddp::MismatchError>([&] { optimizer->load_state_dict(state); });
    const StateDict now = optimizer->state_dict();
    for (const auto& [key, tensor] : good.tensors) {
      CHECK(at::equal(now.tensors.at(key), tensor));
    }
    return message;
  };
  StateDict bad = deep_copy(good);
  for (auto& [key, tensor] : bad.tensors) {
    tensor.zero_();
  }
  SECTION("missing") {
    bad.tensors.erase("state.w.exp_avg_sq");
    CHECK(contains(refused(bad), "state.w.exp_avg_sq is missing"));
  }
  SECTION("unexpected") {
    bad.tensors["state.other.exp_avg"] = at::zeros({1});
    CHECK(contains(refused(bad), "state.other.exp_avg is unexpected"));
  }
  SECTION("another shape") {
    bad.tensors["state.w.exp_avg"] = at::zeros({4, 3});
    CHECK(contains(refused(bad), "state.w.exp_avg has shape [4, 3], here [3, 4]"));
  }
  SECTION("another rule") {
    bad.values["type"] = std::string("sgd");
    CHECK(contains(refused(bad), "type is \"sgd\", here \"adamw\""));
  }
}
