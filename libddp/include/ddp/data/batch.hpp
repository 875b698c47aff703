// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ddp {

/// What a loader makes of examples.
struct Batch {
  at::Tensor data;    ///< [N, …]
  at::Tensor target;  ///< [N]
  int64_t size() const { return data.size(0); }
};
template <typename F>
void for_each_tensor(Batch& batch, F&& f) {
  f(batch.data);
  f(batch.target);
}

}  // namespace ddp
