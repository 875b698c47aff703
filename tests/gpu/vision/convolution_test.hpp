// SPDX-License-Identifier: Apache-2.0
// Common code of the tests of convolutional ops on a GPU.
#pragma once

#include <torch/torch.h>

#include "gpu/language/lm_test.hpp"

namespace gpu_test {

using lm_test::leaf;
using lm_test::reference_of;
using lm_test::relative_error;
using torch::autograd::grad;

constexpr auto kLast = torch::MemoryFormat::ChannelsLast;

struct ConvCase {
  int64_t channels, filters, kernel, stride, height, width;
};

/// Tolerance for results rounded once: at most half of 2^-8 (bf16) or 2^-11 (fp16), on average
/// about a third of that.
inline double tolerance(torch::Dtype dtype) {
  return dtype == torch::kBFloat16 ? 0.003 : dtype == torch::kHalf ? 0.0005 : 1e-5;
}

inline torch::Tensor image_of(torch::IntArrayRef shape, torch::Dtype dtype, bool last) {
  const auto image = dtype == torch::kByte ? torch::randint(256, shape, torch::kCUDA).to(dtype)
                                           : torch::randn(shape, torch::kCUDA).to(dtype);
  return last ? image.contiguous(kLast) : image;
}

inline torch::Tensor last_leaf(torch::IntArrayRef shape, torch::Dtype dtype, double scale = 1) {
  return leaf(shape, dtype, scale).detach().contiguous(kLast).requires_grad_(true);
}

}  // namespace gpu_test
