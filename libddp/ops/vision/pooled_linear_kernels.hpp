// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ops/kernel_types.hpp"

namespace ddp::ops::detail {

/// Largest number of classes of the fused kernels.
inline constexpr int kMaxFusedClasses = 32;

struct PooledShape {
  int batch, pixels, channels, classes;
  Element element;  ///< of x and the logits: bf16 or fp16
  Element weights;  ///< of weight and bias
};

/// pooled [batch, channels] in float32 and logits [batch, classes] from x [batch, pixels,
/// channels]. classes and channels within the limits above, channels a multiple of 8.
cudaError_t launch_pooled_linear(const PooledShape& shape, const void* x, const void* weight,
                                 const void* bias, float* pooled, void* logits,
                                 cudaStream_t stream);
/// All gradients; grad_x [batch, pixels, channels] may be nullptr.
cudaError_t launch_pooled_linear_backward(const PooledShape& shape, const void* grad_logits,
                                          const void* weight, const float* pooled, void* grad_x,
                                          const GradOut& grad_weight, const GradOut& grad_bias,
                                          cudaStream_t stream);

/// pooled [batch, channels] in x's type; channels a multiple of 8.
cudaError_t launch_pool(const PooledShape& shape, const void* x, void* pooled, cudaStream_t stream);
/// grad_x[b, p, c] = grad_pooled[b, c] / pixels
cudaError_t launch_unpool(const PooledShape& shape, const void* grad_pooled, void* grad_x,
                          cudaStream_t stream);

}  // namespace ddp::ops::detail
