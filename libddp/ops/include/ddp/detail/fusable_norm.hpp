// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "ddp/ops/vision.hpp"

namespace ddp::ops {

/// A normalisation module that these ops can replace. Models find it with a dynamic_cast.
class FusableNorm {
 public:
  virtual ~FusableNorm() = default;
  /// nullopt if only the module's own forward can compute the layer.
  virtual std::optional<BatchNormLayer> fusable_layer() const = 0;
  /// num_batches_tracked, which the caller of these ops increments in training.
  virtual at::Tensor batch_counter() const = 0;
};

/// Zeroed int32 memory in which the kernels count blocks. Undefined during a capture, since memory
/// of a graph must not be kept outside it.
at::Tensor batch_norm_kernel_counters(const at::Tensor& weight);

}  // namespace ddp::ops
