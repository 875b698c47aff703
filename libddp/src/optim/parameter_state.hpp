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

/// The memory of a parameter. set_data and module->to may replace it between two steps.
struct ParameterMemory {
  const void* data = nullptr;
  at::Device device = at::kCPU;
  at::Tensor layout;  ///< sizes, strides and dtype, without memory
};
ParameterMemory memory_of(const at::Tensor& parameter);
bool is_in(const at::Tensor& parameter, const ParameterMemory& memory);

struct ParameterState {
  std::string name;
  at::Tensor leaf;
  ParameterMemory memory;         // of the leaf, when its state was made or last adapted to it
  at::Tensor updated;             // tensor that the rule updates: the leaf or its master
  std::vector<at::Tensor> slots;  // in the rule's order
  at::Tensor step;                // 0-dim, updates made
  bool needs_master = false;
  bool has_state = false;  // an update was made or loaded
};

/// By name of slot: those of the rule, `step` if updates are counted, and `master`.
std::map<StateKey, at::Tensor> tensors_of(const ParameterState& parameter, const UpdateRule& rule);

/// Adds the tensors of a parameter with state. First checks its leaf and updates its master.
void add_to(StateDict& state, const ParameterState& parameter, const UpdateRule& rule);

/// Adds the tensors of a parameter with state as they are.
void add_unchecked_to(StateDict& state, const ParameterState& parameter, const UpdateRule& rule);

/// The gradient of a parameter, possibly undefined. Throws SettingsError if it is sparse or sharded
/// over the ranks.
const at::Tensor& checked_gradient(const std::string& name, const at::Tensor& leaf);

/// Other code may write a leaf at any time. Each element of the master that does not round to the
/// leaf's element is set to it. All others keep their low bits. Flat updates do the same in their
/// own pass (flat_master).
void update_master(const ParameterState& parameter);

/// Sets a master to its leaf. Ranks that trained apart may have different masters even where these
/// round to the same leaf. A leaf of another shape is left to the next step, which refuses it.
void restart_master(const ParameterState& parameter);

/// Throws SettingsError: a parameter's dtype, device or layout differs from its state's.
[[noreturn]] void refuse_replaced(const std::string& name);

/// Refuses a leaf that was replaced by one of another device or dtype (but bfloat16 may become
/// float16) and, once there is state, of another shape or memory order: updates index the raw
/// memory of leaf and state alike.
void check_leaf(const ParameterState& parameter);

/// Equal sizes, and equal strides except of dimensions of size 1, which do not affect memory.
bool same_memory_layout(const at::Tensor& a, const at::Tensor& b);

}  // namespace ddp::detail
