// SPDX-License-Identifier: Apache-2.0
// A model whose gradients are small integers for any weights, so that sums over ranks are exact in
// any order. Also its optimizers.
#pragma once

#include <torch/torch.h>

#include "ddp/optim/make_optimizer.hpp"
#include "distributed/ddp_test_utils.hpp"
#include "distributed/state_parts.hpp"

namespace ddp::test {

// Parameters whose sizes make bucket parts end inside them; one has channels_last memory, and one
// has no elements.
struct PiecesImpl : torch::nn::Module {
  explicit PiecesImpl(torch::ScalarType dtype = torch::kFloat) {
    const std::vector<std::vector<int64_t>> shapes{{3, 5, 3, 3}, {7},    {33, 9}, {},
                                                   {130},        {1, 2}, {0, 3}};
    const char* const names[] = {"w0", "w1", "w2", "w3", "w4", "w5", "w6"};
    for (size_t i = 0; i < shapes.size(); ++i) {
      auto value = integers(shapes[i], 40 + static_cast<int64_t>(i)) * 0.25 + 1;
      if (i == 0) {
        value = value.to(torch::MemoryFormat::ChannelsLast);
      }
      weights.push_back(register_parameter(names[i], value.to(dtype)));
    }
  }
  // d loss / d weight = integers of (rank, step, weight)
  torch::Tensor forward(const torch::Tensor& which) {
    auto loss = torch::zeros({}, on_device());
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto seed = which.item<int64_t>() * 100 + static_cast<int64_t>(i);
      loss = loss + (weights[i].to(torch::kFloat) * integers(weights[i].sizes().vec(), seed)).sum();
    }
    return loss;
  }
  std::vector<torch::Tensor> weights;
};
TORCH_MODULE(Pieces);

inline torch::Tensor batch(int64_t step) {
  return torch::tensor(step * 8 + rank());
}

inline OptimizerOptions rule(OptimizerType type, bool zero1) {
  OptimizerOptions options;
  options.type = type;
  options.momentum = 0.9;
  options.weight_decay = 0.01;
  options.decay_norm_and_bias = false;
  options.implementation = OptimizerImplementation::Flat;
  options.zero1 = zero1;
  options.groups = {{.patterns = {"w2", "full"}, .lr_scale = 0.5, .weight_decay = 0.125}};
  return options;
}

inline void require_same_weights(const Pieces& a, const Pieces& b) {
  for (size_t i = 0; i < a->weights.size(); ++i) {
    INFO("parameter " << i);
    REQUIRE(torch::equal(a->weights[i].detach(), b->weights[i].detach()));
  }
}

inline void require_same_state(const StateDict& left, const StateDict& right) {
  const StateDict a = copy_of(left);
  const StateDict b = copy_of(right);
  REQUIRE((a.values == b.values));
  REQUIRE(a.tensors.size() == b.tensors.size());
  for (const auto& [key, tensor] : a.tensors) {
    INFO(key.text());
    REQUIRE(torch::equal(tensor.cpu(), b.tensors.at(key).cpu()));
  }
}

// A model with its optimizer.
struct Trainer {
  Trainer(const OptimizerOptions& options, const DdpOptions& ddp_options = {},
          torch::ScalarType dtype = torch::kFloat, CommunicatorPtr communicator = group())
      : module(dtype),
        model(module, std::move(communicator), ddp_options),
        optimizer(make_optimizer(model, options)) {}

  void backward(int64_t step) { model.forward(batch(step)).backward(); }
  void train(int64_t step) {
    model.zero_grad();
    backward(step);
    optimizer->step(0.0625);
  }
  Pieces module;
  DistributedDataParallel<Pieces> model;
  std::unique_ptr<Optimizer> optimizer;
};

inline std::vector<double> caps() {
  return {25, 600.0 / (1 << 20), 1.0 / (1 << 20)};
}

}  // namespace ddp::test
