// SPDX-License-Identifier: Apache-2.0
// Repeats on any device the training of tests/golden/make_optimizer_golden.py with torch.optim.
#pragma once

#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "ddp/optim/make_optimizer.hpp"
#include "support/catch.hpp"
#include "unit/optim/optim_test_support.hpp"

namespace optim_test {

constexpr int64_t kGoldenSteps = 100;

struct GoldenRun {
  ddp::OptimizerImplementation implementation = ddp::OptimizerImplementation::List;
  bool channels_last = false;
  bool lr_on_device = false;
  at::Device device = at::kCPU;

  /// Tolerance for state `key`. Lists call PyTorch's fused CUDA kernels, whose squares in Adam
  /// differ from PyTorch's CPU by up to 14.75. The flat optimizer's do not.
  double state_ulps(const ddp::StateKey& key) const {
    const bool theirs = device.is_cuda() && implementation == ddp::OptimizerImplementation::List;
    return theirs && key.slot.ends_with("exp_avg_sq") ? 16.0 : torch_ulps(kGoldenSteps);
  }
};

inline ddp::OptimizerOptions golden_options(const std::string& name, const nlohmann::json& json) {
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

inline ddp::NamedParameters golden_parameters(const GoldenRun& run) {
  const std::vector<std::pair<std::string, std::vector<int64_t>>> shapes = {
      {"conv.weight", {4, 3, 3, 3}},
      {"fc.weight", {7, 5}},
      {"fc.bias", {33}},
      {"late.weight", {6, 2}}};
  ddp::NamedParameters parameters;
  for (size_t k = 0; k < shapes.size(); ++k) {
    at::Tensor tensor = weights(shapes[k].second, static_cast<int64_t>(k)).detach().to(run.device);
    if (run.channels_last && tensor.dim() == 4) {
      tensor = tensor.contiguous(at::MemoryFormat::ChannelsLast);
    }
    parameters.push_back({shapes[k].first, tensor.requires_grad_()});
  }
  return parameters;
}

inline void golden_step(ddp::Optimizer& optimizer, const ddp::NamedParameters& parameters,
                        int64_t step, const GoldenRun& run) {
  for (size_t k = 0; k < parameters.size(); ++k) {
    if (parameters[k].name == "late.weight" && step < 3) {
      continue;
    }
    // Contiguous even if the weight is channels_last: the optimizer has to convert the gradient.
    parameters[k].tensor.mutable_grad() =
        gradient(parameters[k].tensor.sizes(), static_cast<int64_t>(k), step).to(run.device);
  }
  const double lr = 0.0625 / static_cast<double>(1 + step % 8);
  if (run.lr_on_device) {
    optimizer.step({.lr = at::scalar_tensor(lr, at::kFloat).to(run.device)});
  } else {
    optimizer.step(lr);
  }
}

inline bool can_be_flat(const nlohmann::json& golden) {
  return golden["options"].value("dampening", 0.0) == 0.0;
}

// Checks weights after each step in the file, the last one included, and then the state.
inline void check_golden_case(const std::string& name, const nlohmann::json& golden,
                              const GoldenRun& run) {
  const ddp::NamedParameters parameters = golden_parameters(run);
  ddp::OptimizerOptions options = golden_options(name, golden["options"]);
  options.implementation = run.implementation;
  auto optimizer = ddp::make_optimizer(parameters, options);
  const nlohmann::json& snapshots = golden["parameters"];
  REQUIRE(snapshots.contains(std::to_string(kGoldenSteps)));
  for (int64_t step = 0; step < kGoldenSteps; ++step) {
    golden_step(*optimizer, parameters, step, run);
    const std::string key = std::to_string(step + 1);
    for (size_t k = 0; snapshots.contains(key) && k < parameters.size(); ++k) {
      INFO(parameters[k].name << " after " << key << " steps");
      const at::Tensor expected = tensor_of(snapshots[key][parameters[k].name]);
      CHECK(ulps(parameters[k].tensor, expected) <= torch_ulps(step + 1));
    }
  }
  const ddp::StateDict state = optimizer->state_dict();
  CHECK(state.tensors.size() == golden["state"].size());
  for (const auto& [key, values] : golden["state"].items()) {
    INFO(key);
    REQUIRE(state.tensors.count(key) == 1);
    CHECK(ulps(state.tensors.at(key), tensor_of(values)) <= run.state_ulps(key));
  }
}

}  // namespace optim_test
