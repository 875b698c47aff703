// SPDX-License-Identifier: Apache-2.0
// Common code of the tests of ops.
#pragma once

#include <torch/torch.h>

namespace ops_test {

/// Normal random numbers, as a leaf with a gradient.
inline torch::Tensor input(torch::IntArrayRef shape, torch::Dtype dtype = torch::kDouble) {
  return torch::randn(shape, dtype).requires_grad_(true);
}

inline bool close(const torch::Tensor& a, const torch::Tensor& b, double tolerance = 1e-6) {
  return torch::allclose(a, b, tolerance, tolerance * 1e-1);
}

}  // namespace ops_test
