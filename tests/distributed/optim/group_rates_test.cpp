// SPDX-License-Identifier: Apache-2.0
// Groups with their own learning rates, given in every way to every optimizer: each parameter moves
// by its own rate, as alone in an optimizer. With a rate of 0 it does not move.
#include <torch/torch.h>

#include <functional>

#include "ddp/amp/amp.hpp"
#include "ddp/core/error.hpp"
#include "ddp/optim/lr_schedule.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "distributed/state_parts.hpp"
#include "support/message_of.hpp"

using namespace ddp;
using namespace ddp::test;
using testing::message_of;

namespace {

using Rates = std::vector<double>;  // of the parameters, in units of the step's learning rate

// One parameter per group. The empty one has no element that could show its rate.
struct GroupedImpl : torch::nn::Module {
  explicit GroupedImpl(torch::ScalarType dtype) {
    const std::vector<std::vector<int64_t>> shapes{{5, 7}, {0, 4}, {9}, {3, 3, 2}, {130}};
    for (size_t i = 0; i < shapes.size(); ++i) {
      const auto value = integers(shapes[i], 70 + static_cast<int64_t>(i)) * 0.25 + 1;
      weights.push_back(register_parameter("w" + std::to_string(i), value.to(dtype)));
    }
  }
  torch::Tensor gradient(size_t i, int64_t step) const {
    return integers(weights[i].sizes().vec(), 100 * step + static_cast<int64_t>(i));
  }
  torch::Tensor forward(int64_t step) {
    auto loss = torch::zeros({}, on_device());
    for (size_t i = 0; i < weights.size(); ++i) {
      loss = loss + (weights[i].to(torch::kFloat) * gradient(i, step)).sum();
    }
    return loss;
  }
  std::vector<torch::Tensor> weights;
};
TORCH_MODULE(Grouped);

constexpr double kFirstLr = 0.0625, kGamma = 0.5;
constexpr int64_t kStepSize = 2;

enum class Kind { List, Flat, Zero, Wrapped };
enum class Way { Host, Device, Schedule, Scaler, ClipAndStep, OwnSchedule };

struct Rule {
  std::string name;
  OptimizerOptions options = {};  // without a name of torch::optim's
};

OptimizerOptions options_of(OptimizerType type) {
  OptimizerOptions options;
  options.type = type;
  options.momentum = 0.875;
  options.weight_decay = 0.0625;
  options.trust_coefficient = 0.125;
  return options;
}

std::vector<Rule> rules_of(Kind kind) {
  if (kind == Kind::Wrapped) {
    return {{"sgd"}, {"adam"}, {"adamw"}, {"rmsprop"}, {"adagrad"}};
  }
  auto plain = options_of(OptimizerType::Sgd);
  plain.momentum = 0;
  auto amsgrad = options_of(OptimizerType::AdamW);
  amsgrad.amsgrad = true;
  std::vector<Rule> rules{{"plain", plain},
                          {"momentum", options_of(OptimizerType::Sgd)},
                          {"adam", options_of(OptimizerType::Adam)},
                          {"adamw", options_of(OptimizerType::AdamW)},
                          {"amsgrad", amsgrad}};
  if (kind == Kind::List) {
    auto dampened = options_of(OptimizerType::Sgd);
    dampened.dampening = 0.25;
    rules.push_back({"dampened", dampened});
  }
  if (kind != Kind::Zero) {
    rules.push_back({"lars", options_of(OptimizerType::Lars)});
    rules.push_back({"lamb", options_of(OptimizerType::Lamb)});
  }
  return rules;
}

template <typename Class, typename Options>
std::shared_ptr<torch::optim::Optimizer> torch_optimizer(const std::vector<torch::Tensor>& weights,
                                                         const Rates& rates, Options options) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (size_t i = 0; i < weights.size(); ++i) {
    options.lr(rates[i]);
    groups.emplace_back(std::vector{weights[i]}, std::make_unique<Options>(options));
  }
  return std::make_shared<Class>(groups, options);
}

std::shared_ptr<torch::optim::Optimizer> torch_optimizer(const std::string& name,
                                                         const std::vector<torch::Tensor>& weights,
                                                         const Rates& rates) {
  namespace optim = torch::optim;
  if (name == "sgd") {
    return torch_optimizer<optim::SGD>(weights, rates,
                                       optim::SGDOptions(1).momentum(0.875).weight_decay(0.0625));
  }
  if (name == "adam") {
    return torch_optimizer<optim::Adam>(weights, rates, optim::AdamOptions().amsgrad(true));
  }
  if (name == "adamw") {
    return torch_optimizer<optim::AdamW>(weights, rates, optim::AdamWOptions().weight_decay(0.25));
  }
  if (name == "rmsprop") {
    return torch_optimizer<optim::RMSprop>(weights, rates, optim::RMSpropOptions().momentum(0.5));
  }
  return torch_optimizer<optim::Adagrad>(weights, rates, optim::AdagradOptions());
}

NamedParameters named(const std::vector<torch::Tensor>& weights) {
  NamedParameters parameters;
  for (size_t i = 0; i < weights.size(); ++i) {
    parameters.push_back({"w" + std::to_string(i), weights[i]});
  }
  return parameters;
}

OptimizerOptions as_kind(OptimizerOptions options, Kind kind) {
  options.implementation =
      kind == Kind::List ? OptimizerImplementation::List : OptimizerImplementation::Flat;
  options.zero1 = kind == Kind::Zero;
  return options;
}

// A model whose parameters have the given rates, and how its steps get their learning rate.
struct Trained {
  Trained(Kind kind, const Rule& rule, const Rates& rates, torch::ScalarType dtype)
      : module(dtype), model(module, group(), with_cap(200.0 / (1 << 20))) {
    if (kind == Kind::Wrapped) {
      auto first_rates = rates;
      for (double& rate : first_rates) {
        rate *= kFirstLr;
      }
      inner = torch_optimizer(rule.name, module->weights, first_rates);
      scheduler = std::make_unique<torch::optim::StepLR>(*inner, kStepSize, kGamma);
      optimizer = wrap_optimizer(inner, model.named_parameters());
      return;
    }
    auto options = as_kind(rule.options, kind);
    for (size_t i = 0; i < rates.size(); ++i) {
      options.groups.push_back({.patterns = {"w" + std::to_string(i)}, .lr_scale = rates[i]});
    }
    optimizer = make_optimizer(model, options);
  }

  void step(Way way, int64_t index, double lr) {
    model.zero_grad();
    const auto loss = model.forward(index);
    const bool scales = way == Way::Scaler || way == Way::ClipAndStep;
    (scales ? scaler.scale(loss) : loss).backward();
    switch (way) {
      case Way::Device:
        return optimizer->step({.lr = torch::full({}, lr, on_device())});
      case Way::Scaler:
        scaler.step(*optimizer, lr);
        return scaler.update();
      case Way::ClipAndStep:
        scaler.clip_and_step(*optimizer, {.lr = lr}, /*max_norm=*/0);
        return scaler.update();
      case Way::OwnSchedule:
        scheduler->step();  // the first call is LibTorch's step 0
        return optimizer->step(StepScalars{});
      default:
        return optimizer->step(lr);
    }
  }

  static AmpOptions amp() {
    AmpOptions options;
    options.grad_scaling = GradScaling::On;
    options.init_scale = 4;
    return options;
  }

  Grouped module;
  DistributedDataParallel<Grouped> model;
  std::shared_ptr<torch::optim::Optimizer> inner;
  std::unique_ptr<torch::optim::StepLR> scheduler;  // Way::OwnSchedule: writes the groups' rates
  std::unique_ptr<Optimizer> optimizer;
  GradScaler scaler{amp()};
};

// Each parameter alone in an optimizer of the same kind (of ZeRO-1: a whole one).
struct Alone {
  Alone(Kind kind, const Rule& rule, torch::ScalarType dtype) : module(dtype) {
    for (const auto& parameter : named(module->weights)) {
      optimizers.push_back(
          kind == Kind::Wrapped
              ? wrap_optimizer(torch_optimizer(rule.name, {parameter.tensor}, {1}), {parameter})
              : make_optimizer({parameter},
                               as_kind(rule.options, kind == Kind::Zero ? Kind::Flat : kind)));
    }
  }
  void step(int64_t index, const Rates& rates, double lr) {
    for (size_t i = 0; i < optimizers.size(); ++i) {
      const auto& weight = module->weights[i];
      weight.mutable_grad() = module->gradient(i, index).to(weight.scalar_type());
      optimizers[i]->step(lr * rates[i]);
    }
  }
  Grouped module;
  std::vector<std::unique_ptr<Optimizer>> optimizers;
};

void require_own_rates(Kind kind, Way way, const Rule& rule, const Rates& rates,
                       torch::ScalarType dtype) {
  CAPTURE(kind, way, rule.name, rates, dtype);
  Trained trained(kind, rule, rates, dtype);
  Alone alone(kind, rule, dtype);
  const Grouped start(dtype);
  // A wrapped optimizer's `lr` is the rate of the first group that has one.
  const auto base = std::find_if(rates.begin(), rates.end(), [](double rate) { return rate != 0; });
  const double unit = kind == Kind::Wrapped && way != Way::OwnSchedule ? *base : 1;
  const LrSchedule schedule(
      {.type = LrScheduleType::Step, .lr = kFirstLr, .gamma = kGamma, .step_size = kStepSize});
  const bool may_rest = way != Way::Schedule && way != Way::OwnSchedule;
  for (int64_t step = 0; step < 5; ++step) {
    CAPTURE(step);
    const double lr = step == 3 && may_rest ? 0 : schedule.at(step);
    std::vector<torch::Tensor> before;
    for (const auto& weight : trained.module->weights) {
      before.push_back(weight.detach().clone());
    }
    trained.step(way, step, lr * unit);
    alone.step(step, rates, lr);
    for (size_t i = 0; i < rates.size(); ++i) {
      CAPTURE(i);
      const auto& weight = trained.module->weights[i];
      REQUIRE(torch::equal(weight, alone.module->weights[i]));
      REQUIRE((lr != 0 || torch::equal(weight, before[i])));
      REQUIRE((rates[i] != 0 || torch::equal(weight, start->weights[i])));
      // bfloat16 may hide a small step from the weight.
      REQUIRE((lr * rates[i] == 0 || weight.numel() == 0 || dtype != torch::kFloat ||
               !torch::equal(weight, before[i])));
    }
  }
}

}  // namespace

TEST_CASE("each group of every optimizer moves by its own rate, however it is given") {
  const auto kind = GENERATE(Kind::List, Kind::Flat, Kind::Zero, Kind::Wrapped);
  const auto way = GENERATE(Way::Host, Way::Device, Way::Schedule, Way::Scaler, Way::ClipAndStep,
                            Way::OwnSchedule);
  if (way == Way::OwnSchedule && kind != Kind::Wrapped) {
    return;  // libddp's optimizers keep no rate
  }
  for (const Rule& rule : rules_of(kind)) {
    for (const Rates& rates : {Rates{0, 1, 0.5, 2, 0.25}, {2, 0.5, 0.25, 1, 0}}) {
      require_own_rates(kind, way, rule, rates, torch::kFloat);
      if (kind != Kind::Wrapped && way == Way::Host) {
        require_own_rates(kind, way, rule, rates, torch::kBFloat16);
      }
    }
  }
}

TEST_CASE("a group that is frozen by a rate of 0 after training does not coast") {
  const auto kind = GENERATE(Kind::List, Kind::Flat, Kind::Zero);
  for (const Rule& rule : rules_of(kind)) {
    CAPTURE(kind, rule.name);
    Trained first(kind, rule, {1, 1, 1, 1, 1}, torch::kFloat);
    first.step(Way::Host, 0, 0.0625);
    first.step(Way::Host, 1, 0.0625);
    Trained frozen(kind, rule, {1, 1, 0, 0, 1}, torch::kFloat);
    frozen.optimizer->load_state_dict(ddp::test::with_all_parts(first.optimizer->state_dict()));
    const Grouped start(torch::kFloat);
    frozen.step(Way::Host, 2, 0.0625);
    for (const size_t i : {0, 2, 3, 4}) {
      CAPTURE(i);
      CHECK(torch::equal(frozen.module->weights[i], start->weights[i]) == (i == 2 || i == 3));
    }
  }
}

TEST_CASE("rates that no group can follow are refused") {
  const auto weights = Grouped(torch::kFloat)->weights;
  for (const auto& weight : weights) {
    weight.mutable_grad() = torch::ones_like(weight);
  }
  const auto start = weights[0].detach().clone();
  const auto parameters = named(weights);
  const auto inner = torch_optimizer("sgd", weights, {0, 0, 0, 0, 0});
  const auto resting = wrap_optimizer(inner, parameters);
  CHECK_THAT(message_of<SettingsError>([&] { resting->step(0.5); }),
             Catch::Contains("every group of the wrapped optimizer was made with 0"));
  resting->step(StepScalars{});
  CHECK(torch::equal(weights[0], start));
  inner->add_param_group(
      torch::optim::OptimizerParamGroup({torch::ones({2}, on_device().requires_grad(true))}));
  CHECK_THAT(message_of<SettingsError>([&] { resting->step(StepScalars{}); }),
             Catch::Contains("groups changed after it was wrapped"));
  const auto twice = torch_optimizer("sgd", {weights[0], weights[0]}, {1, 0});
  CHECK_THAT(message_of<SettingsError>([&] { wrap_optimizer(twice, parameters); }),
             Catch::Contains("has parameter w0 twice"));
  OptimizerOptions options;
  options.groups = {{.patterns = {"head"}, .lr_scale = 0.0}};
  const NamedParameters shared{{"embed", weights[0]}, {"head", weights[0]}};
  CHECK_THAT(message_of<SettingsError>([&] { make_optimizer(shared, options); }),
             Catch::Contains("embed and head are one shared parameter"));
  options.groups = {{.patterns = {"embed", "head"}, .lr_scale = 0.0}};
  make_optimizer(shared, options)->step(1);
  CHECK(torch::equal(weights[0], start));
  options.groups = {{.patterns = {"head"}, .lr_scale = INFINITY}};
  CHECK_THAT(message_of<SettingsError>([&] { make_optimizer(shared, options); }),
             Catch::Contains("groups: lr_scale is inf: must be finite and 0 or more"));
}
