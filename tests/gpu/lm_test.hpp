// SPDX-License-Identifier: Apache-2.0
// Common code of the GPU tests of language models: errors relative to a float64 reference.
#pragma once

#include <torch/torch.h>

namespace lm_test {

/// |a - b| / |b| in the 2-norm, in float64.
inline double relative_error(const torch::Tensor& a, const torch::Tensor& b) {
  const auto reference = b.detach().to(torch::kCPU, torch::kDouble);
  const auto difference = a.detach().to(torch::kCPU, torch::kDouble) - reference;
  return (difference.norm() / reference.norm()).item<double>();
}

/// Normal random numbers on the GPU, rounded to `dtype`, as a leaf with a gradient.
inline torch::Tensor leaf(torch::IntArrayRef shape, torch::Dtype dtype, double scale = 1) {
  return (torch::randn(shape, torch::kCUDA) * scale).to(dtype).requires_grad_(true);
}

/// The same numbers in float64 on the GPU, as a separate leaf.
inline torch::Tensor reference_of(const torch::Tensor& tensor) {
  return tensor.detach().to(torch::kDouble).requires_grad_(tensor.requires_grad());
}

}  // namespace lm_test
