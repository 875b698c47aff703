// SPDX-License-Identifier: Apache-2.0
// What an optimizer keeps of one parameter, and how checkpoints name it.
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
  const void* memory = nullptr;   // of the leaf, when it was last looked at
  at::Tensor updated;             // what the rule updates: the leaf or its master
  std::vector<at::Tensor> slots;  // in the rule's order
  at::Tensor step;                // 0-dim, updates made
  bool needs_master = false;
  bool has_state = false;  // an update was made, or loaded
};

/// `state.<parameter name>.<slot>`, with PyTorch's slots and `master`.
std::map<std::string, at::Tensor> tensors_of(const ParameterState& parameter,
                                             const UpdateRule& rule);

/// Adds those of a parameter that has state, its master following first where the leaf has moved.
void add_to(StateDict& state, const ParameterState& parameter, const UpdateRule& rule);

/// The gradient of a parameter, which may be undefined. Throws SettingsError where it is sparse
/// or this rank holds a part of it only.
const at::Tensor& checked_gradient(const std::string& name, const at::Tensor& leaf);

/// A master takes on what its leaf was overwritten with (ops::overwritten).
void follow_leaf(const ParameterState& parameter, bool exactly);

/// Whether the leaf was given other memory since it was last looked at.
bool has_moved(const ParameterState& parameter);

/// Throws SettingsError: a parameter has a dtype, device or layout that its state has not.
[[noreturn]] void refuse_replaced(const std::string& name);

/// Equal up to the strides of dimensions of size 1, which say nothing about memory.
bool same_memory_layout(const at::Tensor& a, const at::Tensor& b);

}  // namespace ddp::detail
