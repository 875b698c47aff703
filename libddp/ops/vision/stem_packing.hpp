// SPDX-License-Identifier: Apache-2.0
// The rearrangements of stem_convolution: kernels on CUDA in bf16 and fp16, else ATen (the
// definition).
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/grad_target.hpp"

namespace ddp::ops::detail {

/// [batch * rows * columns, 152]: each output pixel's patch, (row, column, channel) of the filter.
at::Tensor stem_patches(const at::Tensor& image, at::ScalarType dtype);

/// [filters, 3, 7, 7] -> [filters, 16, 4, 4] channels last, as stem_space_to_depth() orders them.
at::Tensor stem_filter_to_depth(const at::Tensor& filter, at::ScalarType dtype);
/// [filters, 3, 7, 7] -> [filters, 152], as stem_patches() orders them.
at::Tensor stem_filter_rows(const at::Tensor& filter, at::ScalarType dtype);

/// The inverses, for gradients: target = beta target + gradient, target [filters, 3, 7, 7].
void write_filter_from_depth(const at::Tensor& packed, const at::Tensor& target, double beta);
void write_filter_from_rows(const at::Tensor& packed, const at::Tensor& target, double beta);

/// The convolution, 7x7 of stride 2 or 3x3 of stride 1, as a product without storing the patches.
at::Tensor stem_product(const at::Tensor& image, const at::Tensor& filter, at::ScalarType dtype);
/// Whether stem_product's kernels support the filter, the image and the device.
bool supports_stem_product(const at::Tensor& image, const at::Tensor& filter, at::ScalarType dtype);
/// The filter's gradient of stem_product.
void write_stem_gradient(const at::Tensor& image, const at::Tensor& grad, const GradTarget& target);

/// Output size for an input side of `size`, with stride 2.
inline int64_t stem_output(int64_t size) {
  return (size - 1) / 2 + 1;
}

/// Whether the kernel of stem_patches() supports images of that size.
bool stem_patches_fit_image(const at::Tensor& image);

}  // namespace ddp::ops::detail
