// SPDX-License-Identifier: Apache-2.0
// What tests of adapters share.
#pragma once

#include <torch/torch.h>

#include <stdexcept>
#include <string>

#include "ddp/export/exported_module.hpp"
#include "models/lora.hpp"
#include "support/message_of.hpp"

namespace export_test {

inline at::Tensor values(at::IntArrayRef sizes, double scale) {
  return (at::arange(c10::multiply_integers(sizes), at::kFloat) * scale).sin().reshape(sizes);
}

inline at::Tensor input_rows() {
  return values({6, 4}, 0.3);
}

inline at::Tensor run(ddp::ExportedModuleImpl& module, const at::Tensor& x = input_rows()) {
  return module.forward(x).toTensor();
}

inline at::Tensor parameter(const torch::nn::Module& module, const std::string& name) {
  return module.named_parameters()[name];
}

/// Gives B values too.
inline void randomize(torch::nn::Module& module) {
  torch::NoGradGuard no_grad;
  for (auto& item : module.named_parameters()) {
    if (item.key().ends_with(".lora_B.weight")) {
      item.value().normal_();
    }
  }
}

/// The adapter's part of a layer's result, before it is scaled.
inline at::Tensor low_rank(const torch::nn::Module& module, const std::string& name,
                           const at::Tensor& x) {
  return at::linear(at::linear(x, parameter(module, name + ".lora_A.weight")),
                    parameter(module, name + ".lora_B.weight"));
}

inline std::string add_lora_error(torch::nn::Module& module, const models::LoraOptions& options) {
  return testing::message_of<std::invalid_argument>([&] { models::add_lora(module, options); });
}

}  // namespace export_test
