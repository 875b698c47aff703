// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ops/kernel_types.hpp"
#include "ops/language/dropout_draws.hpp"

namespace ddp::ops::detail {

/// The longest row of the kernels. A row's length must be a multiple of 8.
inline constexpr int64_t kMaxNormDim = 8192;

struct NormRows {
  int64_t rows, dim;
  Element element;  ///< of x, its gradients and the result: bf16 or fp16
  Element weights;  ///< of weight and bias: float32 or `element`
  bool is_rms;      ///< RMSNorm: nothing is subtracted, and there is no bias
  float eps;
};

/// What is added to a LayerNorm's x before it is normed: residual + dropout(x + bias) takes
/// its place.
struct NormBranch {
  const void* residual = nullptr;  ///< [rows, dim]; nullptr: x is normed as it is
  const void* bias = nullptr;      ///< [dim] of the type of the weights, or nullptr
  DropoutDraws draws;
};

/// y = (x - mean) * rstd * weight + bias; RMSNorm: x * rstd * weight. All matrices are [rows, dim],
/// contiguous and 16-byte aligned.
///
///   mean and rstd float32 [rows], for the backward (RMSNorm has no mean)
///   sum [rows, dim]: the normed sum; written if `branch` has a residual
cudaError_t launch_layer_norm(const NormRows& shape, const NormBranch& branch, const void* x,
                              const void* weight, const void* bias, void* sum, void* y, float* mean,
                              float* rstd, cudaStream_t stream);

/// The number of rows of scratch memory that launch_layer_norm_backward() needs for each of the
/// sums over rows.
int num_norm_parts(const NormRows& shape, int multiprocessors);

/// Sums over rows, float32 [num_norm_parts(), dim] each; nullptr where not wanted.
struct NormParts {
  float* weight = nullptr;
  float* bias = nullptr;
  float* branch_bias = nullptr;  ///< only with adds_branch
};

/// grad_x = the norm's gradient + grad_skip, in one pass that also sums the gradients of weight and
/// bias.
///
///   grad_skip [rows, dim] or nullptr
///   x is what was normed
///   grad_branch [rows, dim]: the gradient behind the dropout of `draws`; nullptr: equals grad_x
cudaError_t launch_layer_norm_backward(const NormRows& shape, bool adds_branch,
                                       const DropoutDraws& draws, const void* grad_y,
                                       const void* grad_skip, const void* x, const void* weight,
                                       const float* mean, const float* rstd, void* grad_x,
                                       void* grad_branch, const NormParts& parts, int num_parts,
                                       cudaStream_t stream);

}  // namespace ddp::ops::detail
