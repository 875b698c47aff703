// SPDX-License-Identifier: Apache-2.0
// Squeeze and excitation, x * gate(mean of x over its pixels), without a pass that adds both
// gradients of x.
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::ops::detail {

/// What channel_means() makes of x, for one call of scale_channels().
struct ChannelMeans {
  at::Tensor means;  ///< [batch, channels, 1, 1]
  /// x. With a scale_slot only scale_channels() may read it, once: it returns an unfinished
  /// gradient, which the backward of channel_means() finishes.
  at::Tensor x;
  at::Tensor scale_slot;  ///< takes the scale to that backward; undefined: ATen's op made the means
};

/// Whether the kernels take x: float32, bf16 or fp16 images on CUDA, channels last, with channels a
/// multiple of 8.
bool fits_channel_kernels(const at::Tensor& x);

/// adaptive_avg_pool2d(x, 1) of x [batch, channels, height, width]. The kernel adds in float32.
ChannelMeans channel_means(const at::Tensor& x);

/// of.x * scale. The kernels take a scale [batch, channels, 1, 1] of x's dtype. Their backwards are
/// two passes: sum over pixels of grad * x for the scale, and grad * scale + grad_means / pixels
/// for x, each rounded once. Their results do not depend on timing.
at::Tensor scale_channels(const ChannelMeans& of, const at::Tensor& scale);

/// x * scale, where `scale` [batch, 1, …, 1] has no gradient: stochastic depth. The kernel takes an
/// x of any dense layout whose samples follow each other.
at::Tensor scale_samples(const at::Tensor& x, const at::Tensor& scale);

}  // namespace ddp::ops::detail
