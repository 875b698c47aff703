// SPDX-License-Identifier: Apache-2.0
// Parameters for Muon, their gradients, and the formulas of docs/muon.md, one matrix at a time.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "optim/list_optimizer.hpp"
#include "optim/muon/optimizer.hpp"
#include "support/catch.hpp"
#include "support/same_bits.hpp"
#include "unit/optim/optim_test_support.hpp"

namespace optim_test {

inline constexpr double kLr = 0.015625;

inline ddp::OptimizerOptions muon_options() {
  ddp::OptimizerOptions options;
  options.type = ddp::OptimizerType::Muon;
  options.weight_decay = 0.125;
  return options;
}

// Values of a normal distribution: the singular values of such matrices are of similar size. Where
// one is nearly 0, its direction is rounding noise, which Newton-Schulz multiplies by hundreds.
inline at::Tensor normal(at::IntArrayRef shape, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::TensorOptions(at::kFloat));
}

inline at::Tensor leaf_of(at::IntArrayRef shape, uint64_t seed) {
  return normal(shape, seed).requires_grad_();
}

// Two tall matrices share a batch with the wide one of their shape.
inline ddp::NamedParameters muon_layers(at::ScalarType dtype = at::kFloat) {
  const std::vector<std::pair<std::string, std::vector<int64_t>>> shapes{
      {"tall", {24, 10}},   {"wide", {10, 24}}, {"square", {16, 16}},    {"tall2", {24, 10}},
      {"row", {1, 9}},      {"column", {9, 1}}, {"one", {1, 1}},         {"still", {6, 8}},
      {"zero", {5, 7}},     {"empty", {0, 4}},  {"conv", {6, 4, 3, 3}},  {"conv2", {48, 2, 2, 2}},
      {"norm.weight", {7}}, {"bias", {24}},     {"head.weight", {5, 5}}, {"scalar", {}}};
  ddp::NamedParameters layers;
  for (size_t k = 0; k < shapes.size(); ++k) {
    at::Tensor value = normal(shapes[k].second, 10 + k).mul(0.25).to(dtype);
    if (shapes[k].first == "conv") {
      value = value.contiguous(at::MemoryFormat::ChannelsLast);
    }
    layers.push_back({shapes[k].first, value.requires_grad_()});
  }
  return layers;
}

inline at::Tensor muon_gradient(const ddp::NamedParameter& parameter, size_t k, int64_t step) {
  const at::Tensor gradient =
      normal(parameter.tensor.sizes(),
             1000 + 100 * static_cast<uint64_t>(step) + static_cast<uint64_t>(k));
  return (parameter.name == "zero" ? at::zeros_like(gradient) : gradient)
      .to(parameter.tensor.scalar_type());
}

inline void set_muon_gradients(const ddp::NamedParameters& parameters, int64_t step) {
  for (size_t k = 0; k < parameters.size(); ++k) {
    parameters[k].tensor.mutable_grad() = muon_gradient(parameters[k], k, step);
  }
}

inline void run_muon(ddp::Optimizer& optimizer, int64_t from, int64_t to,
                     const ddp::StepScalars& scalars) {
  for (int64_t step = from; step < to; ++step) {
    set_muon_gradients(optimizer.named_parameters(), step);
    optimizer.step(scalars);
  }
}

inline void require_same_bits(const ddp::NamedParameters& a, const ddp::NamedParameters& b) {
  for (size_t k = 0; k < a.size(); ++k) {
    INFO(a[k].name);
    CHECK(testing::same_bits(a[k].tensor.detach(), b[k].tensor.detach()));
  }
}

inline void require_same_state(const ddp::StateDict& a, const ddp::StateDict& b) {
  CHECK((a.values == b.values));
  REQUIRE(a.tensors.size() == b.tensors.size());
  for (const auto& [key, tensor] : a.tensors) {
    INFO(key);
    CHECK(testing::same_bits(tensor, b.tensors.at(key)));
  }
}

// As make_optimizer(), with products in `dtype`.
inline std::unique_ptr<ddp::detail::MuonOptimizer> make_muon_in(
    at::ScalarType dtype, const ddp::NamedParameters& parameters,
    const ddp::OptimizerOptions& options) {
  const auto settings = ddp::detail::settings_of_parameters(parameters, options);
  ddp::detail::MuonOptimizer::Parts parts{.parameters = settings,
                                          .split = ddp::detail::split_for_muon(settings, options),
                                          .rest = nullptr,
                                          .model = nullptr,
                                          .product_dtype = dtype};
  if (!parts.split.rest.empty()) {
    auto adamw = options;
    adamw.type = ddp::OptimizerType::AdamW;
    parts.rest = std::make_unique<ddp::detail::ListOptimizer>(parts.split.rest, adamw);
  }
  return std::make_unique<ddp::detail::MuonOptimizer>(std::move(parts), options.muon);
}

// U Vᵀ of a matrix U S Vᵀ, nearly.
inline at::Tensor orthogonal(const at::Tensor& matrix, int64_t num_steps) {
  const bool tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = tall ? matrix.t() : matrix;
  x = x / x.norm().clamp_min(1e-7);
  for (int64_t i = 0; i < num_steps; ++i) {
    const at::Tensor gram = at::mm(x, x.t());
    x = 3.4445 * x + at::mm(-4.7750 * gram + 2.0315 * at::mm(gram, gram), x);
  }
  return tall ? x.t() : x;
}

// One matrix in float64.
struct MuonReference {
  at::Tensor weight, momentum;
  double lr_scale = 1.0;
  double weight_decay = 0.0;

  void step(const at::Tensor& given, double step_lr, const ddp::MuonOptions& options) {
    const at::Tensor g = given.to(at::kDouble);
    momentum = options.momentum * momentum + (1 - options.momentum) * g;
    const at::Tensor update =
        options.nesterov ? (1 - options.momentum) * g + options.momentum * momentum : momentum;
    const double lr = step_lr * lr_scale;
    weight = weight * (1 - lr * weight_decay);
    if (weight.numel() == 0) {
      return;
    }
    const auto rows = static_cast<double>(weight.size(0));
    const auto cols = static_cast<double>(weight.numel()) / rows;
    const double factor = options.scale == ddp::MuonScale::Original
                              ? std::sqrt(std::max(1.0, rows / cols))
                              : 0.2 * std::sqrt(std::max(rows, cols));
    weight = weight - lr * factor *
                          orthogonal(update.reshape({weight.size(0), -1}), options.ns_steps)
                              .reshape(weight.sizes());
  }
};

}  // namespace optim_test
