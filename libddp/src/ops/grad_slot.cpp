// SPDX-License-Identifier: Apache-2.0
#include "ddp/ops/grad_slot.hpp"

#include <c10/core/TensorImpl.h>

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
  slot.written = true;
  return beta;
}

}  // namespace ddp::ops
