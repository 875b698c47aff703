// SPDX-License-Identifier: Apache-2.0
#include "optim/parameter_state.hpp"

#include <ATen/Functions.h>

#include "ddp/core/error.hpp"
#include "ops/shared/grad_slot.hpp"
#include "optim/parameter_settings.hpp"

namespace ddp::detail {

std::map<StateKey, at::Tensor> tensors_of(const ParameterState& parameter, const UpdateRule& rule) {
  std::map<StateKey, at::Tensor> tensors;
  const auto key = [&](const std::string& slot) { return StateKey(parameter.name, slot); };
  const std::vector<std::string> slots = rule.slots();
  for (size_t i = 0; i < slots.size(); ++i) {
    tensors[key(slots[i])] = parameter.slots[i];
  }
  if (rule.counts_steps()) {
    tensors[key("step")] = parameter.step;
  }
  if (parameter.needs_master) {
    tensors[key("master")] = parameter.updated;
  }
  return tensors;
}

void add_to(StateDict& state, const ParameterState& parameter, const UpdateRule& rule) {
  if (parameter.has_state) {
    check_leaf(parameter);
    update_master(parameter);
    add_unchecked_to(state, parameter, rule);
  }
}

void add_unchecked_to(StateDict& state, const ParameterState& parameter, const UpdateRule& rule) {
  if (parameter.has_state) {
    state.tensors.merge(tensors_of(parameter, rule));
  }
}

const at::Tensor& checked_gradient(const std::string& name, const at::Tensor& leaf) {
  const at::Tensor& grad = leaf.grad();
  if (grad.defined() && grad.layout() != at::kStrided) {
    throw SettingsError(concat("optimizer: the gradient of ", name,
                               " is sparse; fix: give the parameter to make_sparse_optimizer and "
                               "dense_parameters(model) to make_optimizer, or use sparse(false)"));
  }
  if (ops::has_sharded_gradient(leaf)) {
    throw SettingsError(concat("optimizer: of the gradient of ", name,
                               " each rank has a part only, for the model has an optimizer with "
                               "optimizer.zero1=true: step that one, or set it to false"));
  }
  return grad;
}

void update_master(const ParameterState& parameter) {
  if (!parameter.needs_master || !parameter.has_state) {
    return;  // a master is first made from the leaf
  }
  const at::NoGradGuard no_grad;
  const at::Tensor& master = parameter.updated;
  const at::Tensor leaf = parameter.leaf.detach();
  master.copy_(
      at::where(master.to(leaf.scalar_type()).eq(leaf), master, leaf.to(master.scalar_type())));
}

void restart_master(const ParameterState& parameter) {
  if (parameter.needs_master && parameter.has_state &&
      parameter.leaf.sizes() == parameter.updated.sizes()) {
    const at::NoGradGuard no_grad;
    parameter.updated.copy_(parameter.leaf);
  }
}

ParameterMemory memory_of(const at::Tensor& parameter) {
  return {parameter.const_data_ptr(), parameter.device(),
          at::empty_strided(parameter.sizes(), parameter.strides(),
                            at::TensorOptions(at::kMeta).dtype(parameter.scalar_type()))};
}

bool is_in(const at::Tensor& parameter, const ParameterMemory& memory) {
  return parameter.const_data_ptr() == memory.data &&
         parameter.scalar_type() == memory.layout.scalar_type() &&
         same_memory_layout(parameter, memory.layout);
}

void refuse_replaced(const std::string& name) {
  throw SettingsError(concat("parameter ", name,
                             " was replaced after the optimizer was made, by one of another shape, "
                             "dtype, device or memory order (module->to(…)?): convert the module "
                             "first, then make its optimizer"));
}

void check_leaf(const ParameterState& parameter) {
  const at::Tensor& leaf = parameter.leaf;
  const at::Tensor& before = parameter.memory.layout;
  const bool same_dtype = leaf.scalar_type() == before.scalar_type() ||
                          (is_half(leaf.scalar_type()) && is_half(before.scalar_type()));
  const bool fits = parameter.updated.defined() ? same_memory_layout(leaf, before)
                                                : leaf.is_non_overlapping_and_dense() ==
                                                      before.is_non_overlapping_and_dense();
  if (leaf.device() != parameter.memory.device || !same_dtype || !fits) {
    refuse_replaced(parameter.name);
  }
}

bool same_memory_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) {
    return false;
  }
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    if (a.size(dim) != 1 && a.stride(dim) != b.stride(dim)) {
      return false;
    }
  }
  return true;
}

}  // namespace ddp::detail
