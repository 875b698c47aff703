// SPDX-License-Identifier: Apache-2.0
// The linear layers of a model by name: models::Linear, and layers of a ddp::ops::LinearOwner.
// Not installed.
#pragma once

#include <torch/nn/module.h>

#include <string>
#include <type_traits>
#include <vector>

#include "ddp/ops/linear_owner.hpp"
#include "models/lora.hpp"

namespace models::detail {

/// Calls `on_linear(LinearImpl&, name)` for every models::Linear below `module`, in order of
/// registration, and `on_owner(LinearOwner&, prefix)` for every owner. The prefix, "" or "child.",
/// stands before its layers' names.
template <typename Module, typename OnLinear, typename OnOwner>
void visit_linears(Module& module, const OnLinear& on_linear, const OnOwner& on_owner) {
  using ddp::ops::LinearOwner;
  using Self = std::conditional_t<std::is_const_v<Module>, const LinearOwner, LinearOwner>;
  if (auto* owner = dynamic_cast<Self*>(&module)) {
    on_owner(*owner, std::string());
  }
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    if (auto* linear = dynamic_cast<LinearImpl*>(item.value().get())) {
      on_linear(*linear, item.key());
    } else if (auto* owner = dynamic_cast<LinearOwner*>(item.value().get())) {
      on_owner(*owner, item.key() + ".");
    }
  }
}

/// All of them; the tensors alias the layers'.
std::vector<ddp::ops::LinearLayer> linear_layers(const torch::nn::Module& module);

}  // namespace models::detail
