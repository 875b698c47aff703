// SPDX-License-Identifier: Apache-2.0
// Against torch.optim in Python: tests/golden/make_optimizer_golden.py.
#include <torch/torch.h>

#include <map>

#include "ddp/optim/make_optimizer.hpp"
#include "support/catch.hpp"
#include "unit/optim/optim_test_support.hpp"

using namespace optim_test;

namespace {

// ATen's fused kernels round at other places than the plain loop that wrote the golden file: one
// update differs by at most 1 ulp of the weight; 24 of them by a few.
constexpr double kUlps = 6.0;

const std::vector<std::pair<std::string, std::vector<int64_t>>> kShapes = {
    {"conv.weight", {4, 3, 3, 3}},
    {"fc.weight", {7, 5}},
    {"fc.bias", {33}},
    {"late.weight", {6, 2}}};

ddp::OptimizerOptions options_of(const std::string& name, const nlohmann::json& json) {
  ddp::OptimizerOptions options;
  if (name.rfind("adamw", 0) == 0) {
    options.type = ddp::OptimizerType::AdamW;
    options.weight_decay = 1e-2;  // torch.optim.AdamW's default
  } else if (name.rfind("adam", 0) == 0) {
    options.type = ddp::OptimizerType::Adam;
  }
  options.weight_decay = json.value("weight_decay", options.weight_decay);
  options.momentum = json.value("momentum", 0.0);
  options.dampening = json.value("dampening", 0.0);
  options.nesterov = json.value("nesterov", false);
  options.eps = json.value("eps", 1e-8);
  options.amsgrad = json.value("amsgrad", false);
  options.decay_norm_and_bias = !json.value("no_decay_on_bias", false);
  if (json.contains("betas")) {
    options.beta1 = json["betas"][0];
    options.beta2 = json["betas"][1];
  }
  return options;
}

void check_parameters(const ddp::NamedParameters& parameters, const nlohmann::json& expected) {
  for (const auto& parameter : parameters) {
    INFO(parameter.name);
    CHECK(ulps(parameter.tensor, tensor_of(expected[parameter.name])) <= kUlps);
  }
}

void run_case(const std::string& name, const nlohmann::json& golden, bool channels_last,
              bool lr_on_device,
              ddp::OptimizerImplementation implementation = ddp::OptimizerImplementation::List) {
  ddp::NamedParameters parameters;
  for (size_t k = 0; k < kShapes.size(); ++k) {
    at::Tensor tensor = weights(kShapes[k].second, static_cast<int64_t>(k)).detach();
    if (channels_last && tensor.dim() == 4) {
      tensor = tensor.contiguous(at::MemoryFormat::ChannelsLast);
    }
    parameters.push_back({kShapes[k].first, tensor.requires_grad_()});
  }
  ddp::OptimizerOptions options = options_of(name, golden["options"]);
  options.implementation = implementation;
  auto optimizer = ddp::make_optimizer(parameters, options);
  for (int64_t step = 0; step < 24; ++step) {
    for (size_t k = 0; k < parameters.size(); ++k) {
      if (parameters[k].name == "late.weight" && step < 3) {
        continue;
      }
      // Contiguous even where the weight is channels_last: the optimizer has to bring it over.
      parameters[k].tensor.mutable_grad() =
          gradient(parameters[k].tensor.sizes(), static_cast<int64_t>(k), step);
    }
    const double lr = 0.0625 / static_cast<double>(1 + step % 8);
    if (lr_on_device) {
      optimizer.step({.lr = at::scalar_tensor(lr, at::kFloat)});
    } else {
      optimizer.step(lr);
    }
    const std::string key = std::to_string(step);
    if (golden["parameters"].contains(key)) {
      INFO("step " << step);
      check_parameters(parameters, golden["parameters"][key]);
    }
  }
  const ddp::StateDict state = optimizer.state_dict();
  CHECK(state.tensors.size() == golden["state"].size());
  for (const auto& [key, values] : golden["state"].items()) {
    INFO(key);
    REQUIRE(state.tensors.count(key) == 1);
    CHECK(ulps(state.tensors.at(key).contiguous(), tensor_of(values)) <= kUlps);
  }
}

}  // namespace

TEST_CASE("SGD, Adam and AdamW take torch.optim's steps", "[optim]") {
  const nlohmann::json golden = read_golden("optimizer_golden.json");
  REQUIRE(golden["cases"].size() == 9);
  for (const auto& [name, golden_case] : golden["cases"].items()) {
    DYNAMIC_SECTION(name) {
      run_case(name, golden_case, false, false);
    }
    DYNAMIC_SECTION(name << ", channels_last weight") {
      run_case(name, golden_case, true, false);
    }
    DYNAMIC_SECTION(name << ", lr as a tensor") {
      run_case(name, golden_case, false, true);
    }
    if (golden_case["options"].value("dampening", 0.0) == 0.0) {
      DYNAMIC_SECTION(name << ", flat") {
        run_case(name, golden_case, false, false, ddp::OptimizerImplementation::Flat);
      }
      DYNAMIC_SECTION(name << ", flat, channels_last weight, lr as a tensor") {
        run_case(name, golden_case, true, true, ddp::OptimizerImplementation::Flat);
      }
    }
  }
}
