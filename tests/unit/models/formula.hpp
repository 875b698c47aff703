// SPDX-License-Identifier: Apache-2.0
// Weights and images from a formula: the same bits as in tests/golden/make_resnet_golden.py.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace formula {

inline uint32_t fnv1a(const std::string& text) {
  uint32_t hash = 2166136261U;
  for (const unsigned char c : text) {
    hash = (hash ^ c) * 16777619U;
  }
  return hash;
}

/// float32 in [-0.5, 0.5), exact in 24 bits.
inline torch::Tensor uniform(const std::string& name, at::IntArrayRef shape) {
  auto tensor = torch::empty(shape, torch::kFloat32);
  auto* out = tensor.data_ptr<float>();
  const uint32_t seed = fnv1a(name);
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    uint32_t x = seed + static_cast<uint32_t>(i) * 2654435761U;
    x ^= x >> 16;
    x *= 0x85EBCA6BU;
    x ^= x >> 13;
    x *= 0xC2B2AE35U;
    x ^= x >> 16;
    out[i] = static_cast<float>(x >> 8) / static_cast<float>(1 << 24) - 0.5F;
  }
  return tensor;
}

using NamedTensors = std::vector<std::pair<std::string, torch::Tensor>>;

/// Parameters and buffers in the order of Python's state_dict.
inline void collect_state(const torch::nn::Module& module, const std::string& prefix,
                          NamedTensors& state) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    state.emplace_back(prefix + item.key(), item.value());
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    state.emplace_back(prefix + item.key(), item.value());
  }
  for (const auto& child : module.named_children()) {
    collect_state(*child.value(), prefix + child.key() + ".", state);
  }
}

inline NamedTensors state_of(const torch::nn::Module& module) {
  NamedTensors state;
  collect_state(module, "", state);
  return state;
}

inline bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

inline void fill(torch::nn::Module& module) {
  torch::NoGradGuard no_grad;
  for (auto& [name, tensor] : state_of(module)) {
    if (ends_with(name, "num_batches_tracked")) {
      continue;
    }
    const auto u = uniform(name, tensor.sizes());
    if (tensor.dim() > 1) {
      const auto fan_in = static_cast<double>(tensor[0].numel());
      tensor.copy_(u * static_cast<float>(std::sqrt(24.0 / fan_in)));
    } else if (ends_with(name, ".weight")) {
      tensor.copy_(u * 0.25 + 1.0);
    } else if (ends_with(name, "running_var")) {
      tensor.copy_(u * 0.5 + 1.0);
    } else {
      tensor.copy_(u * 0.25);
    }
  }
}

/// Lines "name [d0, d1]", formatted like Python's lists.
inline std::vector<std::string> keys_of(const torch::nn::Module& module) {
  std::vector<std::string> keys;
  for (const auto& [name, tensor] : state_of(module)) {
    std::string shape;
    for (const auto size : tensor.sizes()) {
      shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    }
    keys.push_back(name + " [" + shape + "]");
  }
  return keys;
}

}  // namespace formula
