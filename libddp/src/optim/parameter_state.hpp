// SPDX-License-Identifier: Apache-2.0
// An optimizer's state of one parameter, and its names in checkpoints.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "ddp/core/state_dict.hpp"
#include "optim/update_rule.hpp"

namespace ddp::detail {

struct ParameterState {
  std::string name;
  at::Tensor leaf;
  const void* memory = nullptr;   // of the leaf at the last check
  at::Tensor updated;             // tensor that the rule updates: the leaf or its master
  std::vector<at::Tensor> slots;  // in the rule's order
  at::Tensor step;                // 0-dim, updates made
  bool needs_master = false;
  bool has_state = false;  // an update was made or loaded
};

/// `state.<parameter name>.<slot>`, with PyTorch's slots and `master`.
std::map<std::string, at::Tensor> tensors_of(const ParameterState& parameter,
                                             const UpdateRule& rule);

/// Adds the tensors of a parameter with state. If the leaf moved, first updates its master.
void add_to(StateDict& state, const ParameterState& parameter, const UpdateRule& rule);

/// The gradient of a parameter, possibly undefined. Throws SettingsError if it is sparse or sharded
/// over the ranks.
const at::Tensor& checked_gradient(const std::string& name, const at::Tensor& leaf);

/// Updates a master from its overwritten leaf (ops::overwritten).
void sync_master_from_parameter(const ParameterState& parameter, bool exactly);

/// Whether the leaf has other memory than at the last check.
bool has_moved(const ParameterState& parameter);

/// Throws SettingsError: a parameter's dtype, device or layout differs from its state's.
[[noreturn]] void refuse_replaced(const std::string& name);

/// Equal up to the strides of dimensions of size 1, which do not affect memory.
bool same_memory_layout(const at::Tensor& a, const at::Tensor& b);

}  // namespace ddp::detail
