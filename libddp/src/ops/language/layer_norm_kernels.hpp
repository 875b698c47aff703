// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ops/kernel_types.hpp"

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

/// y = (x - mean) * rstd * weight + bias; RMSNorm: x * rstd * weight. All matrices are [rows, dim],
/// contiguous and 16-byte aligned.
///
///   mean and rstd float32 [rows], for the backward (RMSNorm has no mean)
cudaError_t launch_layer_norm(const NormRows& shape, const void* x, const void* weight,
                              const void* bias, void* y, float* mean, float* rstd,
                              cudaStream_t stream);

/// The number of rows of scratch memory that launch_layer_norm_backward() needs for each of the two
/// sums over rows.
int num_norm_parts(const NormRows& shape, int multiprocessors);

/// grad_x = the norm's gradient + grad_skip, in one pass that also sums the gradients of weight and
/// bias.
///
///   grad_skip [rows, dim] or nullptr
///   weight_parts and bias_parts float32 [num_norm_parts(), dim], or nullptr where not wanted
cudaError_t launch_layer_norm_backward(const NormRows& shape, const void* grad_y,
                                       const void* grad_skip, const void* x, const void* weight,
                                       const float* mean, const float* rstd, void* grad_x,
                                       float* weight_parts, float* bias_parts, int parts,
                                       cudaStream_t stream);

}  // namespace ddp::ops::detail
