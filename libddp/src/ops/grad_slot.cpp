// SPDX-License-Identifier: Apache-2.0
#include "ddp/ops/grad_slot.hpp"

#include <c10/core/Event.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace ddp::ops {
namespace {

// The tensor itself carries the pointer, so neither a registry nor a lookup is needed and two
// models never meet.
struct GradSlotMeta final : c10::BackendMeta {
  explicit GradSlotMeta(GradSlot* slot_in) : slot(slot_in) {}
  GradSlot* slot;
};

}  // namespace

void set_grad_slot(const at::Tensor& parameter, GradSlot* slot) {
  parameter.unsafeGetTensorImpl()->set_backend_meta(
      slot == nullptr
          ? c10::intrusive_ptr<c10::BackendMeta>()
          : c10::intrusive_ptr<c10::BackendMeta>(c10::make_intrusive<GradSlotMeta>(slot)));
}

GradSlot* find_grad_slot(const at::Tensor& parameter) {
  auto* meta = dynamic_cast<GradSlotMeta*>(parameter.unsafeGetTensorImpl()->get_backend_meta());
  return meta == nullptr ? nullptr : meta->slot;
}

double begin_grad_write(const at::Tensor& parameter, GradSlot& slot) {
  const at::Tensor& grad = parameter.grad();
  const bool aliases = grad.defined() && grad.data_ptr() == slot.memory.data_ptr();
  const double beta = slot.written || aliases ? 1.0 : 0.0;
  if (!slot.memory.is_cpu()) {
    const auto current =
        c10::impl::VirtualGuardImpl(slot.memory.device().type()).getStream(slot.memory.device());
    const auto writer = std::exchange(slot.stream, current);
    if (slot.written && writer && *writer != current) {
      c10::Event event(current.device_type());
      event.record(*writer);
      event.block(current);
    }
  }
  slot.written = true;
  return beta;
}

}  // namespace ddp::ops
