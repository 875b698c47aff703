// SPDX-License-Identifier: Apache-2.0
// Matrix products with the algorithm measured once a shape.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/grad_target.hpp"

namespace ddp::ops::detail {

struct GemmOptions {
  double beta = 0;       ///< 0: `out` is overwritten, 1: added to
  at::Tensor bias = {};  ///< [n] in `a`'s dtype, added to every row; needs beta 0
};

/// out [m, n] = a [m, k] b [k, n] + beta out, sums in float32 (float64 for float64).
///
/// Each matrix is row-major or column-major with any leading dimension, `out` row-major; `out` may
/// be float32 beside bf16 or fp16 factors. On CUDA in bf16 and fp16 through cublasLt: the first
/// call of a shape times the candidates (some ten milliseconds, the host waits) and the process
/// keeps the fastest; where that call is being captured, or with PyTorch's deterministic
/// algorithms, it keeps the library's first proposal. Elsewhere through ATen.
void gemm(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
          const GemmOptions& options = {});

/// target.memory = a b + target.beta target.memory, `out` as above where the target's dtype and
/// layout allow it (a view of it may be passed), else through a copy.
void gemm_into(const GradTarget& target, const at::Tensor& a, const at::Tensor& b);
void gemm_into(const at::Tensor& out, double beta, const at::Tensor& a, const at::Tensor& b);

}  // namespace ddp::ops::detail
