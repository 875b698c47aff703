// SPDX-License-Identifier: Apache-2.0
// Common code of the GPU tests of transformers: the same weights on a GPU in bfloat16 and on the
// CPU in float32.
#pragma once

#include <torch/torch.h>

#include <vector>

#include "support/catch.hpp"

namespace lm_test {

/// Fills every parameter (biases, norms and B too) with noise that bfloat16 represents exactly.
inline void fill_with_noise(torch::nn::Module& model) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(21);
  for (auto& item : model.named_parameters()) {
    auto& value = item.value();
    auto fresh = torch::randn(value.sizes()) * 0.06;
    if (value.dim() == 1 && item.key().ends_with("weight")) {  // of a norm
      fresh += 1;
    }
    value.copy_(fresh.to(torch::kBFloat16).to(torch::kFloat));
  }
}

inline void copy_weights(const torch::nn::Module& from, torch::nn::Module& to) {
  const torch::NoGradGuard no_grad;
  auto targets = to.named_parameters();
  for (const auto& item : from.named_parameters()) {
    targets[item.key()].copy_(item.value());
  }
}

/// bfloat16 rounds about twenty intermediate results by 2^-9, which leaves an error of about 1 % in
/// a gradient. Small gradients (those of key biases: 0 in exact arithmetic) are compared relative
/// to the whole gradient.
inline void check_gradients(const torch::nn::Module& model, const torch::nn::Module& reference) {
  std::vector<torch::Tensor> all;
  for (const auto& parameter : reference.parameters()) {
    if (parameter.requires_grad()) {
      all.push_back(parameter.grad().flatten());
    }
  }
  const double whole = torch::cat(all).norm().item<double>();
  const auto parameters = model.named_parameters();
  for (const auto& item : reference.named_parameters()) {
    CAPTURE(item.key());
    const auto& grad = parameters[item.key()].grad();
    REQUIRE(grad.defined() == item.value().requires_grad());
    if (grad.defined()) {
      const auto expected = item.value().grad();
      const double error = (grad.to(torch::kCPU, torch::kFloat) - expected).norm().item<double>();
      CHECK(error < 0.04 * expected.norm().item<double>() + 0.001 * whole);
    }
  }
}

}  // namespace lm_test
