// SPDX-License-Identifier: Apache-2.0
// The head of a convolutional classifier: global average pool and linear layer.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::ops {

/// linear(mean of x over its pixels, weight, bias).
///
///   x [batch, channels, height, width], weight [classes, channels], bias [classes]; result
///   [batch, classes]
///
/// Defined by at::linear(adaptive_avg_pool2d(x, 1).flatten(1), weight, bias), which also serves
/// CPUs and other dtypes. On CUDA in bf16 or fp16 (autocast's dtype, else x's; weight and bias may
/// be float32) x is read once, channels last (other layouts are copied first). Up to 32 classes:
/// one kernel forward and one backward, pooled values and sums in float32; more classes: two
/// kernels forward and four backward, the pooled values rounded to x's dtype. Gradients of weight
/// and bias go to their grad slots, if any. Saves the pooled values instead of x.
at::Tensor pooled_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace ddp::ops
