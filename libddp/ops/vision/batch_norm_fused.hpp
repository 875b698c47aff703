// SPDX-License-Identifier: Apache-2.0
// The forms of ddp/ops/vision.hpp with custom kernels; none in a build without CUDA.
#pragma once

#include "ddp/ops/vision.hpp"

namespace ddp::ops::detail {

#ifdef DDP_HAS_CUDA

/// Whether the kernels support `x` and `bn`.
bool fits_kernels(const at::Tensor& x, const BatchNormLayer& bn);
/// Whether `other` has the layout of `x`, and `x` and `bn` fit the kernels.
bool fits_addend(const at::Tensor& other, const at::Tensor& x, const BatchNormLayer& bn);

at::Tensor fused_batch_norm(const at::Tensor& x, const BatchNormLayer& bn);
at::Tensor fused_batch_norm_silu(const at::Tensor& x, const BatchNormLayer& bn);
Fork fused_batch_norm_relu(const at::Tensor& x, const BatchNormLayer& bn);
/// `bn_addend` nullptr: the addend is not normalised.
Fork fused_batch_norm_add_relu(const at::Tensor& x, const BatchNormLayer& bn,
                               const at::Tensor& addend, const BatchNormLayer* bn_addend);
Fork fused_batch_norm_relu_max_pool(const at::Tensor& x, const BatchNormLayer& bn);

#else

inline bool fits_kernels(const at::Tensor&, const BatchNormLayer&) {
  return false;
}
inline bool fits_addend(const at::Tensor&, const at::Tensor&, const BatchNormLayer&) {
  return false;
}
inline at::Tensor fused_batch_norm(const at::Tensor& x, const BatchNormLayer&) {
  return x;
}
inline at::Tensor fused_batch_norm_silu(const at::Tensor& x, const BatchNormLayer&) {
  return x;
}
inline Fork fused_batch_norm_relu(const at::Tensor& x, const BatchNormLayer&) {
  return {x, x};
}
inline Fork fused_batch_norm_add_relu(const at::Tensor& x, const BatchNormLayer&, const at::Tensor&,
                                      const BatchNormLayer*) {
  return {x, x};
}
inline Fork fused_batch_norm_relu_max_pool(const at::Tensor& x, const BatchNormLayer&) {
  return {x, x};
}

#endif

}  // namespace ddp::ops::detail
