// SPDX-License-Identifier: Apache-2.0
#include "optim/muon/newton_schulz.hpp"

#include <ATen/Functions.h>

namespace ddp::detail {
namespace {

// p(x) = a x + b x³ + c x⁵, applied to singular values: steep at 0, and not convergent. After five
// steps most singular values lie between 0.7 and 1.2 (https://kellerjordan.github.io/posts/muon/).
constexpr double kA = 3.4445;
constexpr double kB = -4.7750;
constexpr double kC = 2.0315;
constexpr double kEps = 1e-7;

}  // namespace

at::Tensor newton_schulz(const at::Tensor& batch, at::ScalarType dtype, int64_t num_steps) {
  if (batch.numel() == 0) {
    return batch.to(dtype);
  }
  at::Tensor x = batch.to(dtype);
  // The Frobenius norm bounds the largest singular value, and p needs values of at most 1.
  const at::Tensor norms = at::linalg_vector_norm(x, 2, at::IntArrayRef{1, 2}, /*keepdim=*/true);
  x = at::div(x, norms.clamp_min(kEps));
  for (int64_t i = 0; i < num_steps; ++i) {
    const at::Tensor gram = at::bmm(x, x.transpose(1, 2));  // [k, rows, rows]
    x = at::baddbmm(x, at::baddbmm(gram, gram, gram, kB, kC), x, kA);
  }
  return x;
}

}  // namespace ddp::detail
