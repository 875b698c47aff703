// SPDX-License-Identifier: Apache-2.0
#include "linear_layers.hpp"

#include <utility>

namespace models::detail {

std::vector<ddp::ops::LinearLayer> linear_layers(const torch::nn::Module& module) {
  std::vector<ddp::ops::LinearLayer> layers;
  visit_linears(
      module,
      [&](const LinearImpl& linear, const std::string& name) {
        layers.push_back({.name = name,
                          .weight = linear.weight,
                          .lora_a = linear.lora_a,
                          .lora_b = linear.lora_b,
                          .lora_alpha = linear.lora_alpha(),
                          .lora_dropout = linear.lora_dropout()});
      },
      [&](const ddp::ops::LinearOwner& owner, const std::string& prefix) {
        for (auto& layer : owner.linears()) {
          layer.name = prefix + layer.name;
          layers.push_back(std::move(layer));
        }
      });
  return layers;
}

}  // namespace models::detail
