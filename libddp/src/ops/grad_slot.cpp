// SPDX-License-Identifier: Apache-2.0
#include "ops/grad_slot.hpp"

#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "ddp/ops/overwritten.hpp"
#include "ops/overwritten_listener.hpp"
#include "ops/streams/stream_order.hpp"

namespace ddp::ops {
namespace {

// The tensor carries the pointer, so there is no registry or lookup, and models are independent.
struct ParameterMeta final : c10::BackendMeta {
  GradSlot* slot = nullptr;
  const c10::TensorImpl* owner = nullptr;  // of the slot: a detach() shares this meta
  std::function<void(bool)> overwritten;
  const c10::TensorImpl* watched = nullptr;  // the tensor with the listener, not a detach() of it
};

ParameterMeta* find_meta(const at::Tensor& parameter) {
  return dynamic_cast<ParameterMeta*>(parameter.unsafeGetTensorImpl()->get_backend_meta());
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

ParameterMeta& meta_of(const at::Tensor& parameter) {
  ParameterMeta* meta = find_meta(parameter);
  if (meta == nullptr) {
    auto made = c10::make_intrusive<ParameterMeta>();
    meta = made.get();
    parameter.unsafeGetTensorImpl()->set_backend_meta(std::move(made));
  }
  return *meta;
}

}  // namespace

void set_grad_slot(const at::Tensor& parameter, GradSlot* slot) {
  ParameterMeta& meta = meta_of(parameter);
  meta.slot = slot;
  meta.owner = parameter.unsafeGetTensorImpl();
}

GradSlot* find_grad_slot(const at::Tensor& parameter) {
  const ParameterMeta* meta = find_meta(parameter);
  return meta != nullptr && meta->owner == parameter.unsafeGetTensorImpl() &&
                 is_accumulated(parameter)
             ? meta->slot
             : nullptr;
}

void on_overwritten(const at::Tensor& parameter, std::function<void(bool)> listener) {
  auto* impl = parameter.unsafeGetTensorImpl();
  if (const ParameterMeta* meta = find_meta(parameter);
      meta != nullptr && meta->watched != nullptr && meta->watched != impl) {
    // This meta belongs to another parameter and came with its memory (set_data of a detach()).
    impl->set_backend_meta(c10::make_intrusive<ParameterMeta>());
  }
  ParameterMeta& meta = meta_of(parameter);
  meta.overwritten = std::move(listener);
  meta.watched = impl;
}

bool is_watched(const at::Tensor& parameter) {
  const ParameterMeta* meta = find_meta(parameter);
  return meta != nullptr && meta->watched == parameter.unsafeGetTensorImpl();
}

void overwritten(const at::Tensor& parameter, bool exactly) {
  const ParameterMeta* meta = find_meta(parameter);
  if (meta != nullptr && meta->overwritten) {
    meta->overwritten(exactly);
  }
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
