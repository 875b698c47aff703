// SPDX-License-Identifier: Apache-2.0
// The state of torch::optim's optimizers as named tensors. Their own way to save it is a pickle
// file.
#pragma once

#include <torch/optim/optimizer.h>

#include <map>
#include <memory>
#include <string>

namespace ddp::detail {

struct TorchSlot {
  at::Tensor tensor;  // undefined where the state has none
  bool required;      // the optimizer cannot step without it
};

/// "sgd", "adam", "adamw", "rmsprop", "adagrad". Throws SettingsError for other classes.
std::string torch_optimizer_type(const torch::optim::Optimizer& optimizer);

/// Empty state of the class that `optimizer` keeps for a parameter.
std::unique_ptr<torch::optim::OptimizerParamState> make_torch_state(
    const torch::optim::Optimizer& optimizer);

/// Slots by name; "step" is a 0-dim int64 tensor.
std::map<std::string, TorchSlot> read_torch_state(const torch::optim::OptimizerParamState& state);

/// Sets the slots that `slots` holds.
void write_torch_state(torch::optim::OptimizerParamState& state,
                       const std::map<std::string, at::Tensor>& slots);

}  // namespace ddp::detail
