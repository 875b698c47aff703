// SPDX-License-Identifier: Apache-2.0
// Matrix products with an algorithm measured once per shape.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/grad_target.hpp"

namespace ddp::ops::detail {

struct GemmOptions {
  double alpha = 1;        ///< factor of the product
  double beta = 0;         ///< 0: `out` is overwritten, 1: added to
  at::Tensor bias = {};    ///< [n] in `a`'s dtype, any stride, added to every row
  at::Tensor addend = {};  ///< [m, n] in `out`'s dtype, row-major, added; needs beta 0
  /// Factors in FP8 (float8_e4m3fn): float32 [m] and [n], by which rows of `a` and columns of `b`
  /// are multiplied. Then `a` is row-major and `b` column-major, `out` and `bias` are bf16.
  at::Tensor a_scales = {};
  at::Tensor b_scales = {};
};

/// out [m, n] = alpha a [m, k] b [k, n] + beta out, sums in float32 (float64 for float64).
///
/// Each matrix is row-major or column-major with any leading dimension, `out` row-major; `out` may
/// be float32 with bf16 or fp16 factors. Uses cublasLt on CUDA in bf16, fp16 and strict float32
/// (without TF32), else ATen. The first call of a shape times the candidates (some ten
/// milliseconds, the host waits), and the process keeps the fastest. If this call is captured, or
/// with PyTorch's deterministic algorithms, the process keeps the library's first proposal. FP8 on
/// CUDA needs compute capability 9.0; elsewhere its factors are converted to float32.
void gemm(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
          const GemmOptions& options = {});

/// target.memory = alpha a b + target.beta target.memory. Uses gemm() directly if the target's
/// dtype and layout allow it (a view may be passed), else a copy.
void gemm_into(const GradTarget& target, const at::Tensor& a, const at::Tensor& b);
void gemm_into(const at::Tensor& out, double beta, const at::Tensor& a, const at::Tensor& b,
               double alpha = 1);

}  // namespace ddp::ops::detail
