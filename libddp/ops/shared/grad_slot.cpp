// SPDX-License-Identifier: Apache-2.0
#include "ops/shared/grad_slot.hpp"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ops/streams/stream_order.hpp"

namespace ddp::ops {
namespace {

// Which slots a parameter has. A detach() or another view is another TensorImpl and has none. An
// entry keeps its parameter alive, so its address cannot become another tensor's.
class SlotRegistry {
 public:
  struct Registered {
    GradSlot* slot;
    const void* data;  // of the parameter
  };

  void add(const at::Tensor& parameter, GradSlot& slot) {
    const std::lock_guard lock(mutex_);
    auto& [owner, slots] = entries_[key_of(parameter)];
    owner = parameter;
    const int was_shared = slots.size() > 1 ? 1 : 0;
    std::erase_if(slots, [&](const Registered& known) { return known.slot == &slot; });
    slots.push_back({&slot, parameter.const_data_ptr()});
    num_shared_ += (slots.size() > 1 ? 1 : 0) - was_shared;
  }

  void remove(const at::Tensor& parameter, const GradSlot& slot) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(key_of(parameter));
    if (found == entries_.end()) {
      return;
    }
    auto& slots = found->second.slots;
    const int was_shared = slots.size() > 1 ? 1 : 0;
    std::erase_if(slots, [&](const Registered& known) { return known.slot == &slot; });
    num_shared_ += (slots.size() > 1 ? 1 : 0) - was_shared;
    if (slots.empty()) {
      entries_.erase(found);
    }
  }

  /// Whether any parameter has several slots. Almost no program has one.
  bool has_shared() const { return num_shared_ > 0; }

  /// Returns `read(slots)` for the slots of `parameter`, of which there may be none.
  template <typename Read>
  auto with_slots(const at::Tensor& parameter, const Read& read) const {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(key_of(parameter));
    return read(found != entries_.end() ? found->second.slots : none_);
  }

 private:
  struct Entry {
    at::Tensor parameter;
    std::vector<Registered> slots;
  };

  static const void* key_of(const at::Tensor& parameter) { return parameter.unsafeGetTensorImpl(); }

  const std::vector<Registered> none_{};
  mutable std::mutex mutex_;  // autograd's threads ask while other models are made
  std::unordered_map<const void*, Entry> entries_;
  std::atomic<int> num_shared_ = 0;  // parameters with several slots
};

// Never destroyed: a model may be static.
SlotRegistry& registry() {
  static auto& slots = *new SlotRegistry;
  return slots;
}

// A parameter with sparse gradients has a slot without memory of its own.
bool has_memory(const GradSlot& slot) {
  return slot.memory.defined() && slot.memory.has_storage();
}

// Whether the running backward, if any, accumulates into `parameter`. torch::autograd::grad()
// captures the gradient before the accumulator, whose hooks then never report a written slot.
bool is_accumulated(torch::autograd::Node* accumulator) {
  const auto* nodes = torch::autograd::get_current_graph_task_exec_info();
  if (nodes == nullptr || nodes->empty()) {  // no backward, or one without `inputs`
    return true;
  }
  const auto node = nodes->find(accumulator);
  return node != nodes->end() && node->second.needed_;
}

// Whether hooks other than the reducer's read or replace the gradient. The reducer adds one hook
// before and one after the accumulator.
bool has_own_hooks(const at::Tensor& parameter, torch::autograd::Node* accumulator) {
  namespace impl = torch::autograd::impl;
  return !impl::hooks(parameter).empty() || impl::post_acc_grad_hooks(parameter) != nullptr ||
         (accumulator != nullptr &&
          (accumulator->pre_hooks().size() > 1 || accumulator->post_hooks().size() > 1));
}

}  // namespace

void add_grad_slot(const at::Tensor& parameter, GradSlot& slot) {
  registry().add(parameter, slot);
}

void remove_grad_slot(const at::Tensor& parameter, const GradSlot& slot) {
  registry().remove(parameter, slot);
}

GradSlot* find_grad_slot(const at::Tensor& parameter) {
  using Slots = std::vector<SlotRegistry::Registered>;
  GradSlot* slot = registry().with_slots(parameter, [&](const Slots& slots) -> GradSlot* {
    const bool is_usable = slots.size() == 1 && slots[0].data == parameter.const_data_ptr() &&
                           has_memory(*slots[0].slot);
    return is_usable ? slots[0].slot : nullptr;
  });
  if (slot == nullptr || !parameter.requires_grad()) {
    return nullptr;
  }
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  return is_accumulated(accumulator.get()) && !has_own_hooks(parameter, accumulator.get())
             ? slot
             : nullptr;
}

bool has_several_grad_slots(const at::Tensor& parameter) {
  return registry().has_shared() &&
         registry().with_slots(parameter, [](const auto& slots) { return slots.size() > 1; });
}

GradSlot* slot_of_grad(const at::Tensor& parameter) {
  const at::Tensor& grad = parameter.grad();
  if (!grad.defined() || !grad.has_storage()) {
    return nullptr;
  }
  using Slots = std::vector<SlotRegistry::Registered>;
  return registry().with_slots(parameter, [&](const Slots& slots) -> GradSlot* {
    const auto found = std::find_if(slots.begin(), slots.end(), [&](const auto& registered) {
      return has_memory(*registered.slot) && grad.is_alias_of(registered.slot->memory);
    });
    return found != slots.end() ? found->slot : nullptr;
  });
}

bool has_sharded_gradient(const at::Tensor& parameter) {
  const GradSlot* slot = slot_of_grad(parameter);
  return slot != nullptr && slot->is_sharded;
}

double begin_grad_write(const at::Tensor& parameter, GradSlot& slot) {
  const at::Tensor& grad = parameter.grad();
  const bool aliases = grad.defined() && grad.data_ptr() == slot.memory.data_ptr();
  const double beta = slot.written || aliases ? 1.0 : 0.0;
  if (!slot.memory.is_cpu()) {
    const auto current = detail::current_stream(slot.memory.device());
    const auto writer = std::exchange(slot.stream, current);
    if (slot.written && writer) {
      detail::wait_for(*writer, current);
    }
  }
  slot.written = true;
  return beta;
}

}  // namespace ddp::ops
