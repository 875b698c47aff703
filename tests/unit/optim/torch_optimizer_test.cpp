// SPDX-License-Identifier: Apache-2.0
#include "optim/torch_optimizer.hpp"

#include <torch/torch.h>

#include "ddp/optim/make_optimizer.hpp"
#include "support/catch.hpp"
#include "unit/optim/optim_test_support.hpp"

using namespace optim_test;
using ddp::NamedParameters;
using ddp::detail::TorchOptimizer;

namespace {

const ddp::StepScalars kInnerStep{.lr = 0.0625};

NamedParameters two_parameters() {
  return {{"a", weights({3, 2}, 0)}, {"b", weights({4}, 1)}};
}

std::shared_ptr<torch::optim::Optimizer> make_inner(const std::string& type,
                                                    const NamedParameters& parameters) {
  const std::vector<at::Tensor> tensors{parameters[0].tensor, parameters[1].tensor};
  if (type == "sgd") {
    return std::make_shared<torch::optim::SGD>(tensors,
                                               torch::optim::SGDOptions(0.125).momentum(0.9));
  }
  if (type == "adam") {
    return std::make_shared<torch::optim::Adam>(tensors,
                                                torch::optim::AdamOptions(0.125).amsgrad(true));
  }
  if (type == "adamw") {
    return std::make_shared<torch::optim::AdamW>(tensors, torch::optim::AdamWOptions(0.125));
  }
  if (type == "rmsprop") {
    return std::make_shared<torch::optim::RMSprop>(
        tensors, torch::optim::RMSpropOptions(0.125).momentum(0.5));
  }
  return std::make_shared<torch::optim::Adagrad>(tensors, torch::optim::AdagradOptions(0.125));
}

/// A group for each of two parameters, with rates of 1 and 0.25.
std::shared_ptr<torch::optim::SGD> make_sgd_of_two_rates(const NamedParameters& parameters) {
  const std::vector<torch::optim::OptimizerParamGroup> groups{
      torch::optim::OptimizerParamGroup({parameters[0].tensor},
                                        std::make_unique<torch::optim::SGDOptions>(1.0)),
      torch::optim::OptimizerParamGroup({parameters[1].tensor},
                                        std::make_unique<torch::optim::SGDOptions>(0.25))};
  return std::make_shared<torch::optim::SGD>(groups, torch::optim::SGDOptions(1.0));
}

}  // namespace

TEST_CASE("torch::optim's optimizers resume bit for bit through the adapter", "[optim]") {
  const std::string type = GENERATE("sgd", "adam", "adamw", "rmsprop", "adagrad");
  INFO(type);
  NamedParameters whole = two_parameters();
  TorchOptimizer uninterrupted(make_inner(type, whole), whole);
  run_steps(uninterrupted, whole, 0, 4, kInnerStep);
  ddp::StateDict saved = uninterrupted.state_dict();
  NamedParameters resumed;
  for (const auto& parameter : whole) {
    resumed.push_back({parameter.name, parameter.tensor.detach().clone().requires_grad_()});
  }
  for (auto& [key, tensor] : saved.tensors) {
    tensor = tensor.clone();
  }
  run_steps(uninterrupted, whole, 4, 7, kInnerStep);
  TorchOptimizer optimizer(make_inner(type, resumed), resumed);
  optimizer.load_state_dict(saved);
  run_steps(optimizer, resumed, 4, 7, kInnerStep);
  for (size_t k = 0; k < whole.size(); ++k) {
    CHECK(at::equal(resumed[k].tensor.detach(), whole[k].tensor.detach()));
  }
  saved.tensors["state.a.nonsense"] = at::zeros({1});
  CHECK(contains(message_of<ddp::MismatchError>([&] { optimizer.load_state_dict(saved); }),
                 "state.a.nonsense is unexpected"));
}

TEST_CASE("The adapter sets learning rates and keeps the groups' ratios", "[optim]") {
  NamedParameters parameters = two_parameters();
  TorchOptimizer optimizer(make_sgd_of_two_rates(parameters), parameters);
  const at::Tensor a = parameters[0].tensor.detach().clone();
  const at::Tensor b = parameters[1].tensor.detach().clone();
  parameters[0].tensor.mutable_grad() = at::ones_like(a);
  parameters[1].tensor.mutable_grad() = at::ones_like(b);
  optimizer.step({.lr = 0.5, .inverse_scale = 0.5});
  CHECK(at::equal(parameters[0].tensor.detach(), a - 0.25));
  CHECK(at::equal(parameters[1].tensor.detach(), b - 0.0625));
  optimizer.step({.lr = 0.5, .found_inf = 1.0});
  CHECK(at::equal(parameters[0].tensor.detach(), a - 0.25));
  CHECK_FALSE(optimizer.capturable());
  CHECK_FALSE(optimizer.supports_found_inf());
}

TEST_CASE("A step without arguments keeps the groups' rates, also those set later", "[optim]") {
  NamedParameters parameters = two_parameters();
  const auto inner = make_sgd_of_two_rates(parameters);
  const auto optimizer = ddp::wrap_optimizer(inner, parameters);
  const at::Tensor a = parameters[0].tensor.detach().clone();
  const at::Tensor b = parameters[1].tensor.detach().clone();
  parameters[0].tensor.mutable_grad() = at::ones_like(a);
  parameters[1].tensor.mutable_grad() = at::ones_like(b);
  optimizer->step();
  CHECK(at::equal(parameters[0].tensor.detach(), a - 1));
  CHECK(at::equal(parameters[1].tensor.detach(), b - 0.25));
  inner->param_groups()[1].options().set_lr(0.5);  // as a scheduler of torch::optim does
  optimizer->step();
  CHECK(at::equal(parameters[0].tensor.detach(), a - 2));
  CHECK(at::equal(parameters[1].tensor.detach(), b - 0.75));
}

TEST_CASE("The adapter wants every parameter's name", "[optim]") {
  NamedParameters parameters = two_parameters();
  auto inner = make_inner("sgd", parameters);
  parameters.pop_back();
  CHECK(contains(message_of<ddp::SettingsError>([&] { TorchOptimizer(inner, parameters); }),
                 "has no name"));
}
