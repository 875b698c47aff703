// SPDX-License-Identifier: Apache-2.0
// The C++ side of muon_torch_test.py.
//
//   muon_tool INPUT OUTPUT NESTEROV SCALE LR WEIGHT_DECAY
//
// INPUT has tensors weight.<name> and grad.<step>.<name>. OUTPUT gets weight.<name> and
// momentum.<name> after these steps of Muon.
#include <torch/torch.h>

#include <string>

#include "ddp/core/safetensors.hpp"
#include "ddp/optim/make_optimizer.hpp"

int main(int argc, char** argv) {
  if (argc != 7) {
    return 64;
  }
  const auto input = ddp::load_safetensors(argv[1]).tensors;
  ddp::NamedParameters parameters;
  for (const auto& [key, tensor] : input) {
    if (key.starts_with("weight.")) {
      parameters.push_back({key.substr(7), tensor.clone().requires_grad_()});
    }
  }
  ddp::OptimizerOptions options;
  options.type = ddp::OptimizerType::Muon;
  options.muon.nesterov = std::string(argv[3]) == "true";
  options.muon.scale =
      std::string(argv[4]) == "original" ? ddp::MuonScale::Original : ddp::MuonScale::MatchRmsAdamW;
  options.weight_decay = std::stod(argv[6]);
  auto optimizer = ddp::make_optimizer(parameters, options);
  const auto gradient_key = [](int64_t step, const std::string& name) {
    return "grad." + std::to_string(step) + "." + name;
  };
  for (int64_t step = 0; input.contains(gradient_key(step, parameters[0].name)); ++step) {
    for (const auto& [name, tensor] : parameters) {
      tensor.mutable_grad() = input.at(gradient_key(step, name)).clone();
    }
    optimizer->step(std::stod(argv[5]));
  }
  ddp::TensorMap output;
  const auto state = optimizer->state_dict();
  for (const auto& [name, tensor] : parameters) {
    output["weight." + name] = tensor.detach();
    output["momentum." + name] = state.tensors.at({name, "momentum_buffer"});
  }
  ddp::save_safetensors(argv[2], output);
}
