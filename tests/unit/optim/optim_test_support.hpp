// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/core/state_dict.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/optim/optimizer.hpp"
#include "support/message_of.hpp"

namespace optim_test {

inline nlohmann::json read_golden(const std::string& file) {
  std::ifstream in(std::string(DDP_SOURCE_DIR) + "/tests/golden/" + file);
  if (!in) {
    throw std::runtime_error("cannot open golden file " + file);
  }
  return nlohmann::json::parse(in);
}

// ((i * a + b) mod m - m / 2) / 64: products of two are exact in float32 and bfloat16. The golden
// scripts use the same formula.
inline at::Tensor formula(at::IntArrayRef shape, int64_t a, int64_t b, int64_t modulus) {
  at::Tensor out = at::empty(shape, at::kFloat);
  float* data = out.data_ptr<float>();
  for (int64_t i = 0; i < out.numel(); ++i) {
    data[i] = static_cast<float>((i * a + b) % modulus - modulus / 2) / 64.0F;
  }
  return out;
}

inline at::Tensor weights(at::IntArrayRef shape, int64_t k) {
  return formula(shape, 29, 17 * k, 101).requires_grad_();
}

inline at::Tensor gradient(at::IntArrayRef shape, int64_t k, int64_t step) {
  return formula(shape, 37, 13 * k + 101 * step, 257);
}

inline ddp::OptimizerOptions as(ddp::OptimizerOptions options,
                                ddp::OptimizerImplementation implementation) {
  options.implementation = implementation;
  return options;
}

inline void set_gradients(const ddp::NamedParameters& parameters, int64_t step) {
  for (size_t k = 0; k < parameters.size(); ++k) {
    parameters[k].tensor.mutable_grad() =
        gradient(parameters[k].tensor.sizes(), static_cast<int64_t>(k), step);
  }
}

inline void run_steps(ddp::Optimizer& optimizer, const ddp::NamedParameters& parameters,
                      int64_t from, int64_t to, const ddp::StepScalars& scalars) {
  for (int64_t step = from; step < to; ++step) {
    set_gradients(parameters, step);
    optimizer.step(scalars);
  }
}

// State as in a checkpoint: later steps do not change it.
inline ddp::StateDict deep_copy(const ddp::StateDict& state) {
  ddp::StateDict copy = state;
  for (auto& [key, tensor] : copy.tensors) {
    tensor = tensor.clone();
  }
  return copy;
}

// The largest |a - b| in units of 2^-23 max(1, |b|): float32's spacing at 1, and one to two
// spacings at a larger |b|. Weights near zero are differences of larger numbers and keep their
// rounding errors.
inline double ulps(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.detach().to(at::kCPU, at::kDouble).flatten();
  const at::Tensor y = b.detach().to(at::kCPU, at::kDouble).flatten();
  const at::Tensor spacing = y.abs().clamp_min(1.0) * std::pow(2.0, -23);
  return ((x - y).abs() / spacing).max().item<double>();
}

// Permitted distance of weights and state from PyTorch's own optimizers after `num_updates`, in
// units of ulps(): 10 after 100. Every update rounds in other places than PyTorch's, and repeated
// roundings add up. PyTorch multiplies weights by 1 - lr * weight_decay; the flat optimizer
// subtracts lr * weight_decay of them.
inline double torch_ulps(int64_t num_updates) {
  return 2.0 + 0.08 * static_cast<double>(num_updates);
}

inline at::Tensor tensor_of(const nlohmann::json& values) {
  return at::tensor(values.get<std::vector<double>>(), at::kDouble);
}

using testing::message_of;

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace optim_test
