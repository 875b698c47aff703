// SPDX-License-Identifier: Apache-2.0
// A model and data for comparing gradients, shared by libddp-selftest and the tests. All values are
// small integers, so that every sum and every mean over 1, 2, 4, … ranks is exact in any order.
// Results can then be compared with ==.
#pragma once

#include <torch/torch.h>

#include <vector>

namespace ddp::exact {

/// Integers in [-2, 2] on the CPU, the same on every rank for the same arguments.
inline torch::Tensor integers(const std::vector<int64_t>& shape, int64_t seed) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
  return torch::randint(-2, 3, shape, generator).to(torch::kFloat);
}

/// Three linear layers with biases, and ReLU between them: six parameters. Takes four features.
struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(at::Device device, int64_t seed = 7, int64_t width = 5) {
    first = register_module("first", torch::nn::Linear(4, width));
    second = register_module("second", torch::nn::Linear(width, width));
    third = register_module("third", torch::nn::Linear(width, 3));
    const torch::NoGradGuard no_grad;
    int64_t index = 0;
    for (auto& parameter : parameters()) {
      parameter.copy_(integers(parameter.sizes().vec(), seed * 100 + index++));
    }
    to(device);
  }
  /// With `skip_second` the second layer is not used.
  torch::Tensor forward(const torch::Tensor& x, bool skip_second = false) {
    const auto hidden = torch::relu(first(x));
    return third(skip_second ? hidden : torch::relu(second(hidden)));
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
};
TORCH_MODULE(Mlp);

}  // namespace ddp::exact
