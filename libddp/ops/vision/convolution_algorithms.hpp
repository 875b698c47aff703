// SPDX-License-Identifier: Apache-2.0
// The algorithms of stem_convolution() and conv2d(), for tests and benchmarks. The public functions
// choose Auto.
#pragma once

#include "ddp/ops/vision.hpp"

namespace ddp::ops {

/// Exact rearrangements of a convolution over three channels into shapes for tensor cores.
enum class StemAlgorithm {
  Auto,          ///< CUDA with bf16 or fp16: one of the rearrangements; otherwise Library
  Library,       ///< at::conv2d, which defines the result
  SpaceToDepth,  ///< 7x7: 2x2 cells of pixels become channels; any device and dtype
  Im2col,  ///< each output pixel's patch is a row of a matrix. 7x7: any device and dtype; 3x3: 64
           ///< filters, at most 32 pixels per row, bf16 or fp16
};

/// If the image requires a gradient, Library is used. For 7x7 `image` may be the result of
/// stem_space_to_depth(), which must not require one.
at::Tensor stem_convolution(const at::Tensor& image, const at::Tensor& weight,
                            StemAlgorithm algorithm);

/// The input of SpaceToDepth:
///
///   result [batch, 16, rows + 3, columns + 3], channels last, of `dtype`, with rows and columns
///   those of the convolution's result;
///   result[n, (dy * 2 + dx) * 4 + c, i, j] = padded[n, c, 2 i + dy, 2 j + dx], padded being the
///   image with 3 zeros before its first row and column and zeros behind its last; c = 3 is zero
at::Tensor stem_space_to_depth(const at::Tensor& image, at::ScalarType dtype);

enum class Conv2dAlgorithm {
  Auto,     ///< CUDA with bf16 or fp16: Product if there is such a form; else Library
  Library,  ///< at::conv2d's kernels, which define the result
  Product,  ///< dense products, on any device and dtype; raises if there is no such form
};

/// Forms of Product, which are exact: 1x1 with stride 1, or with one output pixel; 3x3 on 1x1
/// pixels, or on 2x2 with stride 1 or 2. Filter elements that only see padding get a zero gradient.
at::Tensor conv2d(const at::Tensor& x, const at::Tensor& weight, int64_t stride, int64_t padding,
                  Conv2dAlgorithm algorithm);

}  // namespace ddp::ops
