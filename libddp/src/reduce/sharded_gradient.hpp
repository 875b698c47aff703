// SPDX-License-Identifier: Apache-2.0
// Gradients of which each rank holds its part only carry a mark, so that nobody takes one for
// whole, nor for a gradient once their memory serves to send weights.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include "ddp/core/error.hpp"

namespace ddp::detail {

struct ShardedGradientMeta final : c10::BackendMeta {
  bool holds_weights = false;
};

[[noreturn]] inline void refuse_sent_weights() {
  throw SettingsError(
      "with optimizer.zero1=true gradients are gone after the backward of a step that "
      "Optimizer::begin_step began: leave begin_step out of steps whose gradients are read (for a "
      "norm, clipping, a scan), or set optimizer.overlap_backward=false");
}

inline void mark_sharded_gradient(const at::Tensor& memory) {
  memory.unsafeGetTensorImpl()->set_backend_meta(
      c10::intrusive_ptr<c10::BackendMeta>(c10::make_intrusive<ShardedGradientMeta>()));
}

inline ShardedGradientMeta* sharded_gradient_meta(const at::Tensor& gradient) {
  return gradient.defined() ? dynamic_cast<ShardedGradientMeta*>(
                                  gradient.unsafeGetTensorImpl()->get_backend_meta())
                            : nullptr;
}

inline bool is_sharded_gradient(const at::Tensor& gradient) {
  return sharded_gradient_meta(gradient) != nullptr;
}

}  // namespace ddp::detail
