// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <memory>
#include <type_traits>

#include "ddp/reduce/data_parallel_model.hpp"

namespace ddp::detail {

/// Parameters and buffers of a torch::nn module. A tensor registered twice is listed once.
ModelTensors tensors_of(const std::shared_ptr<torch::nn::Module>& module);
ModelTensors tensors_of(const torch::jit::Module& module);

template <typename Module>
ModelTensors tensors_of_any(const Module& module) {
  if constexpr (std::is_base_of_v<torch::jit::Module, Module>) {
    return tensors_of(static_cast<const torch::jit::Module&>(module));
  } else if constexpr (requires { module.ptr(); }) {
    return tensors_of(std::static_pointer_cast<torch::nn::Module>(module.ptr()));
  } else {
    return tensors_of(std::static_pointer_cast<torch::nn::Module>(module));
  }
}

}  // namespace ddp::detail
