// SPDX-License-Identifier: Apache-2.0
// Convolutions without bias, 1x1 and 3x3, as residual networks use them. Where an image has shrunk
// to 1x1 or 2x2 pixels a convolution is one dense matrix product: a 3x3 filter on one pixel uses
// its centre alone, on 2x2 pixels each input pixel meets each output pixel in one known tap. A
// library's kernel would walk over all nine taps, most of them padding.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::ops {

enum class Conv2dAlgorithm {
  Auto,     ///< CUDA with bf16 or fp16: Product where there is such a form; else Library
  Library,  ///< at::conv2d's kernels, which define the result
  Product,  ///< dense products, on any device and dtype; raises where there is no such form
};

/// conv2d(x, weight, stride, padding), without bias, groups or dilation.
///
///   x [batch, channels, height, width]; weight [filters, channels, 1, 1] with padding 0, or
///   [filters, channels, 3, 3] with padding 1
///
/// Forms of Product: 1x1 with stride 1, or with one output pixel; 3x3 on 1x1 pixels, or on 2x2 with
/// stride 1 or 2. Exact rearrangements: the sums are the convolution's, in another order.
///
/// Computes in autocast's dtype, else in x's. On CUDA in bf16 or fp16 the result is channels last
/// and the gradient of `weight` goes to its grad slot where the algorithm is Product, a WgradBranch
/// is open (wgrad_branch.hpp) or the slot is of that dtype; otherwise it comes back in weight's
/// dtype. Taps that no output uses have the gradient zero.
///
/// Library with cuDNN's benchmark wanted (at::globalContext().setBenchmarkCuDNN) measures cuDNN's
/// engines itself at the first call of a shape, by the device's time; without it, in deterministic
/// mode and for shapes first met in a capture, at::conv2d chooses.
at::Tensor conv2d(const at::Tensor& x, const at::Tensor& weight, int64_t stride, int64_t padding,
                  Conv2dAlgorithm algorithm = Conv2dAlgorithm::Auto);

}  // namespace ddp::ops
