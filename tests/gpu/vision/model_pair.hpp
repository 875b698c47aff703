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
inline void check_gradients(const torch::nn::Module& model, const torch::nn::Module& reference,
                            double of_own_norm = 0.04, double of_whole = 0.001) {
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
      CHECK(error < of_own_norm * expected.norm().item<double>() + of_whole * whole);
    }
  }
}

/// Recomputing no layer, all of them or every second gives the same loss and gradients, bit for
/// bit.
template <typename Model, typename Batch>
void check_recomputed(Model& model, const Batch& batch) {
  std::vector<std::vector<torch::Tensor>> results;
  for (const int64_t every : {0, 1, 2}) {
    model.computation().checkpoint_every = every;
    model.zero_grad();
    torch::manual_seed(23);
    const auto output = model.forward(batch.input, batch.labels);
    output.loss_sum.backward();
    results.push_back({output.loss_sum.detach()});
    for (const auto& parameter : model.parameters()) {
      if (parameter.requires_grad()) {
        results.back().push_back(parameter.grad().clone());
      }
    }
  }
  for (std::size_t i = 0; i < results[0].size(); ++i) {
    CAPTURE(i);
    CHECK(torch::equal(results[0][i], results[1][i]));
    CHECK(torch::equal(results[0][i], results[2][i]));
  }
}

}  // namespace lm_test
