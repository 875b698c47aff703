// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "ddp/detail/describe.hpp"
#include "ddp/reduce/model_tensors.hpp"

namespace ddp::detail {

/// Parameters and buffers of a torch::nn module. A tensor registered twice is listed once.
ModelTensors tensors_of(const std::shared_ptr<torch::nn::Module>& module);
ModelTensors tensors_of(const torch::jit::Module& module);

/// Adds the module in whose forward `error` was raised to its message: "in aten::view in the
/// forward of body.1 (Block) of Net". Where that is unknown it names the model alone. TorchScript
/// modules name their place themselves.
void add_forward_place(c10::Error& error, const torch::nn::Module& model) noexcept;

/// One number for the training modes of a model: equal numbers mean equal modes.
uint64_t mode_key(const ModelTensors& tensors);

template <typename Module>
ModelTensors tensors_of_any(const Module& module) {
  if constexpr (std::is_base_of_v<torch::jit::Module, Module>) {
    return tensors_of(static_cast<const torch::jit::Module&>(module));
  } else if constexpr (requires { module.ptr(); }) {
    return tensors_of(std::static_pointer_cast<torch::nn::Module>(module.ptr()));
  } else if constexpr (std::is_convertible_v<Module, std::shared_ptr<torch::nn::Module>>) {
    return tensors_of(std::static_pointer_cast<torch::nn::Module>(module));
  } else {
    static_assert(
        always_false<Module>,
        "DistributedDataParallel takes no module by value: pass std::make_shared<Net>(…), "
        "a holder made by TORCH_MODULE, or a torch::jit::Module");
    return ModelTensors{};
  }
}

/// The module behind a holder or a shared_ptr.
template <typename Module>
auto& module_of(Module& module) {
  if constexpr (requires { *module; }) {
    return *module;
  } else {
    return module;
  }
}

template <typename Module, typename... Args>
auto call_forward(Module& module, Args&&... args) {
  if constexpr (std::is_base_of_v<torch::jit::Module, Module>) {
    std::vector<c10::IValue> inputs;
    (inputs.emplace_back(std::forward<Args>(args)), ...);
    return module.forward(std::move(inputs));
  } else {
    auto& callee = module_of(module);
    try {
      return callee.forward(std::forward<Args>(args)...);
    } catch (c10::Error& error) {
      if constexpr (std::is_base_of_v<torch::nn::Module, std::remove_cvref_t<decltype(callee)>>) {
        add_forward_place(error, callee);
      }
      throw;
    }
  }
}

}  // namespace ddp::detail
