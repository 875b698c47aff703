// SPDX-License-Identifier: Apache-2.0
// The state of torch::optim's optimizers as named tensors, instead of LibTorch's pickle files.
#pragma once

#include <torch/optim/optimizer.h>

#include <map>
#include <memory>
#include <string>

namespace ddp::detail {

struct TorchSlot {
  at::Tensor tensor;  // undefined if the state has none
  bool required;      // the optimizer cannot step without it
};

/// "sgd", "adam", "adamw", "rmsprop", "adagrad". Throws SettingsError for other classes.
std::string torch_optimizer_type(const torch::optim::Optimizer& optimizer);

/// Makes an empty state of the class that `optimizer` keeps per parameter.
std::unique_ptr<torch::optim::OptimizerParamState> make_torch_state(
    const torch::optim::Optimizer& optimizer);

/// Slots by name; "step" is a 0-dim int64 tensor.
std::map<std::string, TorchSlot> read_torch_state(const torch::optim::OptimizerParamState& state);

/// Sets the slots in `slots`.
void write_torch_state(torch::optim::OptimizerParamState& state,
                       const std::map<std::string, at::Tensor>& slots);

}  // namespace ddp::detail
