// SPDX-License-Identifier: Apache-2.0
// The first convolution of a ResNet, over three channels, in shapes for tensor cores: 7x7 of stride
// 2 and padding 3, or, for images of 32 pixels, 3x3 of stride 1 and padding 1. Three input channels
// fill only three of the sixteen lanes of tensor cores. The exact rearrangements here fill them.
//
//   SpaceToDepth: the image, padded by 3, is cut into 2x2 cells whose pixels become channels; the
//                 filter, padded to 8x8, likewise becomes 4x4 over 16 channels, stride 1, no
//                 padding (12 of the 16 channels carry something).
//   Im2col:       each output pixel's 7x7x3 patch becomes one row of a matrix, 147 columns and 5 of
//                 zeros: for small images with few patches. With 64 filters patches exist only in
//                 shared memory.
//
// 3x3 filters have Im2col only in shared memory (64 filters, at most 32 pixels per row, bf16 or
// fp16). Everything else uses Library.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::ops {

enum class StemAlgorithm {
  Auto,          ///< CUDA with bf16 or fp16: one of the rearrangements; otherwise Library
  Library,       ///< at::conv2d, which defines the result
  SpaceToDepth,  ///< runs on any device and dtype (tests)
  Im2col,        ///< 7x7: runs on any device and dtype (tests)
};

/// conv2d(image, weight, stride 2, padding 3), with a 3x3 weight stride 1 and padding 1; without
/// bias.
///
///   image   [batch, 3, height, width], any layout; float32, float64, bf16, fp16 or uint8 (cast as
///           it is: normalised or not, that is the caller's), or what stem_space_to_depth() made
///   weight  [filters, 3, 7, 7] or [filters, 3, 3, 3]
///   result  [batch, filters, (height - 1) / 2 + 1, (width - 1) / 2 + 1] or [batch, filters,
///           height, width], channels last where an algorithm other than Library ran
///
/// Computes in autocast's dtype, else in weight's. Saves only the rearranged image for the
/// backward. The gradient of `weight` goes to its grad slot if it has one, else it is returned in
/// weight's dtype. An image that requires a gradient uses Library. An image of 16 channels cannot
/// have a gradient.
at::Tensor stem_convolution(const at::Tensor& image, const at::Tensor& weight,
                            StemAlgorithm algorithm = StemAlgorithm::Auto);

/// The input of SpaceToDepth, for loaders that can make it in their own kernel:
///
///   result [batch, 16, rows + 3, columns + 3], channels last, of `dtype`, with rows and columns
///   those of the convolution's result;
///   result[n, (dy * 2 + dx) * 4 + c, i, j] = padded[n, c, 2 i + dy, 2 j + dx], padded being the
///   image with 3 zeros before its first row and column and zeros behind its last; c = 3 is zero.
///
/// Not differentiable: an image that requires a gradient is refused.
at::Tensor stem_space_to_depth(const at::Tensor& image, at::ScalarType dtype);

}  // namespace ddp::ops
