// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "ddp/core/visit_tensors.hpp"

namespace ddp {

/// Collated examples.
struct Batch {
  at::Tensor data;    ///< [N, …]
  at::Tensor target;  ///< [N]
  int64_t size() const { return data.size(0); }
};
inline void for_each_tensor(Batch& batch, const TensorVisitor& visit) {
  visit(batch.data);
  visit(batch.target);
}

}  // namespace ddp
