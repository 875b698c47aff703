// SPDX-License-Identifier: Apache-2.0
// Marks gradients of which each rank holds only a part, so that no code uses such a gradient as the
// whole mean.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

namespace ddp::detail {

struct ShardedGradientMeta final : c10::BackendMeta {};

inline void mark_sharded_gradient(const at::Tensor& memory) {
  memory.unsafeGetTensorImpl()->set_backend_meta(
      c10::intrusive_ptr<c10::BackendMeta>(c10::make_intrusive<ShardedGradientMeta>()));
}

inline bool is_sharded_gradient(const at::Tensor& gradient) {
  return gradient.defined() && dynamic_cast<ShardedGradientMeta*>(
                                   gradient.unsafeGetTensorImpl()->get_backend_meta()) != nullptr;
}

}  // namespace ddp::detail
