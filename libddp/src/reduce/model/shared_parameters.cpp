// SPDX-License-Identifier: Apache-2.0
#include "reduce/model/shared_parameters.hpp"

#include <algorithm>

#include "ops/shared/grad_slot.hpp"
#include "reduce/buckets/gradient_arena.hpp"

namespace ddp::detail {

bool is_shared(const GradientArena& gradients, int parameter) {
  return ops::has_several_grad_slots(gradients.parameters()[static_cast<size_t>(parameter)].tensor);
}

bool any_is_shared(const GradientArena& gradients) {
  const auto& parameters = gradients.parameters();
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const auto& entry) { return ops::has_several_grad_slots(entry.tensor); });
}

void record_local_gradient(const GradientArena& gradients, int parameter) {
  const at::Tensor& tensor = gradients.parameters()[static_cast<size_t>(parameter)].tensor;
  if (!ops::has_several_grad_slots(tensor)) {
    return;
  }
  if (ops::GradSlot* slot = ops::slot_of_grad(tensor)) {
    slot->added_to = true;
  }
}

bool shared_gradient_waits(const GradientArena& gradients) {
  const auto& parameters = gradients.parameters();
  return std::any_of(parameters.begin(), parameters.end(), [](const auto& entry) {
    if (!entry.tensor.grad().defined() || !ops::has_several_grad_slots(entry.tensor)) {
      return false;
    }
    const auto* slot = ops::slot_of_grad(entry.tensor);
    return slot == nullptr || !slot->reduced || slot->added_to;
  });
}

}  // namespace ddp::detail
