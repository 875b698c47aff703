// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/train/weights.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "support/same_bits.hpp"
#include "unit/train/temporary_folder.hpp"

namespace testing {

/// A module with parameters of any names.
class NamedModule : public torch::nn::Module {
 public:
  explicit NamedModule(const ddp::TensorMap& parameters) {
    for (const auto& [name, tensor] : parameters) {
      add(name, tensor.clone());
    }
  }

 private:
  void add(const std::string& name, const at::Tensor& tensor) {
    torch::nn::Module* module = this;
    std::size_t begin = 0;
    for (auto dot = name.find('.'); dot != std::string::npos; dot = name.find('.', begin)) {
      module = child(*module, name.substr(begin, dot - begin));
      begin = dot + 1;
    }
    module->register_parameter(name.substr(begin), tensor, /*requires_grad=*/false);
  }
  static torch::nn::Module* child(torch::nn::Module& module, const std::string& name) {
    for (const auto& item : module.named_children()) {
      if (item.key() == name) {
        return item.value().get();
      }
    }
    return module.register_module(name, std::make_shared<torch::nn::Module>(name)).get();
  }
};

inline ddp::TensorMap zeros_like(const ddp::TensorMap& tensors) {
  ddp::TensorMap zeros;
  for (const auto& [name, tensor] : tensors) {
    zeros.emplace(name, torch::zeros_like(tensor));
  }
  return zeros;
}

/// A safetensors file with any header.
inline std::string with_header(const std::string& json, const std::string& data) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) {
    bytes[i] = static_cast<char>(json.size() >> 8 * i & 0xff);
  }
  return bytes + json + data;
}

}  // namespace testing
