// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ops/kernel_types.hpp"

namespace ddp::ops::detail {

/// Activations [batch, pixels, channels], channels a multiple of 8, of fewer than 2^30 vectors of 8
/// channels. Their addresses are multiples of 16.
struct ChannelShape {
  int batch, pixels, channels;
  Element element;  ///< of all tensors: float32, bf16 or fp16
};

/// sums[n, c] = factor * (sum over p of a[n, p, c] * b[n, p, c]), added in float32 in a fixed
/// order. `b` nullptr: of a[n, p, c].
cudaError_t launch_channel_sums(const ChannelShape& shape, const void* a, const void* b,
                                float factor, void* sums, cudaStream_t stream);

/// y[n, p, c] = x[n, p, c] * scale[n, c] + factor * addend[n, c], rounded once. nullptr is a scale
/// of 1, or an x or addend of 0.
cudaError_t launch_channel_scale(const ChannelShape& shape, const void* x, const void* scale,
                                 const void* addend, float factor, void* y, cudaStream_t stream);

}  // namespace ddp::ops::detail
