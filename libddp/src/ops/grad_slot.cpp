// SPDX-License-Identifier: Apache-2.0
#include "ops/grad_slot.hpp"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "ops/streams/stream_order.hpp"

namespace ddp::ops {
namespace {

// Which slot a parameter has. A detach() or another view is another TensorImpl and has none. An
// entry keeps its parameter alive, so its address cannot become another tensor's.
class SlotRegistry {
 public:
  struct Entry {
    at::Tensor parameter;
    const void* data = nullptr;  // of the parameter
    GradSlot* slot = nullptr;
  };

  void set(const at::Tensor& parameter, GradSlot* slot) {
    const std::lock_guard lock(mutex_);
    if (slot == nullptr) {
      entries_.erase(key_of(parameter));
    } else {
      entries_[key_of(parameter)] = {parameter, parameter.const_data_ptr(), slot};
    }
  }

  /// An entry without slot if there is none.
  Entry find(const at::Tensor& parameter) const {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(key_of(parameter));
    return found != entries_.end() ? found->second : Entry{};
  }

 private:
  static const void* key_of(const at::Tensor& parameter) { return parameter.unsafeGetTensorImpl(); }

  mutable std::mutex mutex_;  // autograd's threads ask while other models are made
  std::unordered_map<const void*, Entry> entries_;
};

// Never destroyed: a model may be static.
SlotRegistry& registry() {
  static auto& slots = *new SlotRegistry;
  return slots;
}

// Whether the running backward, if any, accumulates into `parameter`. torch::autograd::grad()
// captures the gradient before the accumulator, whose hooks then never report a written slot.
bool is_accumulated(const at::Tensor& parameter) {
  const auto* nodes = torch::autograd::get_current_graph_task_exec_info();
  if (nodes == nullptr || nodes->empty()) {  // no backward, or one without `inputs`
    return true;
  }
  const auto node = nodes->find(torch::autograd::impl::try_get_grad_accumulator(parameter).get());
  return node != nodes->end() && node->second.needed_;
}

}  // namespace

void set_grad_slot(const at::Tensor& parameter, GradSlot* slot) {
  registry().set(parameter, slot);
}

GradSlot* find_grad_slot(const at::Tensor& parameter) {
  const auto entry = registry().find(parameter);
  return entry.slot != nullptr && entry.data == parameter.const_data_ptr() &&
                 is_accumulated(parameter)
             ? entry.slot
             : nullptr;
}

const GradSlot* registered_grad_slot(const at::Tensor& parameter) {
  return registry().find(parameter).slot;
}

bool has_sharded_gradient(const at::Tensor& parameter) {
  const GradSlot* slot = registered_grad_slot(parameter);
  const at::Tensor& grad = parameter.grad();
  return slot != nullptr && slot->is_sharded && grad.defined() && grad.is_alias_of(slot->memory);
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
