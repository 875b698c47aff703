// SPDX-License-Identifier: Apache-2.0
// Convolutions without bias, 1x1 and 3x3, as in residual networks. On images of 1x1 or 2x2 pixels a
// convolution is one dense matrix product. A 3x3 filter on one pixel uses only its centre. On 2x2
// pixels one known tap connects each input pixel with each output pixel. A library's kernel would
// compute all nine taps, most of them padding.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::ops {

enum class Conv2dAlgorithm {
  Auto,     ///< CUDA with bf16 or fp16: Product if there is such a form; else Library
  Library,  ///< at::conv2d's kernels, which define the result
  Product,  ///< dense products, on any device and dtype; raises if there is no such form
};

/// conv2d(x, weight, stride, padding), without bias, groups or dilation.
///
///   x [batch, channels, height, width]; weight [filters, channels, 1, 1] with padding 0, or
///   [filters, channels, 3, 3] with padding 1
///
/// Forms of Product: 1x1 with stride 1, or with one output pixel; 3x3 on 1x1 pixels, or on 2x2 with
/// stride 1 or 2. These rearrangements are exact: the convolution's sums in another order.
///
/// Computes in autocast's dtype, else in x's. On CUDA in bf16 or fp16 the result is channels last.
/// The gradient of `weight` then goes to its grad slot with Product, an open WgradBranch
/// (wgrad_branch.hpp) or a slot of the compute dtype. Otherwise it is returned in weight's dtype.
/// Unused taps have a zero gradient.
///
/// With cuDNN's benchmark enabled (at::globalContext().setBenchmarkCuDNN) Library times cuDNN's
/// engines on the device at the first call of a shape. Without it, in deterministic mode and for
/// shapes first met in a capture, at::conv2d chooses.
at::Tensor conv2d(const at::Tensor& x, const at::Tensor& weight, int64_t stride, int64_t padding,
                  Conv2dAlgorithm algorithm = Conv2dAlgorithm::Auto);

}  // namespace ddp::ops
