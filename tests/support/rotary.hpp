// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

namespace ddp::test {

/// x * cos + rotate_half(x) * sin, as transformers composes it.
inline torch::Tensor rotated(const torch::Tensor& x, const torch::Tensor& cos,
                             const torch::Tensor& sin) {
  const auto halves = x.chunk(2, -1);
  return x * cos + torch::cat({-halves[1], halves[0]}, -1) * sin;
}

}  // namespace ddp::test
