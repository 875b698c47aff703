// SPDX-License-Identifier: Apache-2.0
// Common code of the GPU tests of language models: errors relative to a float64 reference.
#pragma once

#include <torch/torch.h>

namespace lm_test {

/// Rounding of single results: 2^-9 in bfloat16 and 2^-12 in float16, on average less. Sums in
/// float32 stay below 1e-5, in TF32 they do not.
inline double tolerance_of(torch::Dtype dtype) {
  return dtype == torch::kBFloat16 ? 4e-3 : dtype == torch::kFloat ? 1e-5 : 5e-4;
}

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
