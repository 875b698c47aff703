// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "ops/vision/stem_kernels.hpp"
#include "ops/vision/tap_kernels.hpp"

namespace ddp::ops::detail {

/// The stem's convolution over small images and its filter's gradient, as products with patches
/// that exist only in shared memory.
struct StemProducts {
  static constexpr int kFilters = 64;
  static constexpr int kPixels = 128;  ///< of the result per tile, whole rows
  static constexpr int kMaxSide = 64;  ///< of StemAlgorithm::Auto's images here: all fit

  StemImage image;
  StemFilter filter;  ///< read forward
  Element element;    ///< compute type: bf16 or fp16
  int size;           ///< of the filter: 7 (stride 2, padding 3) or 3 (stride 1, padding 1)

  int tile_rows() const { return std::min(kPixels / image.columns, image.rows); }
  int tiles() const { return image.batch * ((image.rows + tile_rows() - 1) / tile_rows()); }
  /// Whether kernels support the call: tall, narrow images need too much shared memory.
  bool fits() const;
};

/// out [batch, rows, columns, 64].
cudaError_t launch_stem_forward(const StemProducts& call, void* out, int num_sms,
                                cudaStream_t stream);

int stem_gradient_splits(const StemProducts& call, int num_sms);
/// partial [splits, 64, size, size, 3], for launch_sum_parts(), from grad [batch, rows, columns,
/// 64].
cudaError_t launch_stem_gradient(const StemProducts& call, const void* grad, int splits,
                                 float* partial, cudaStream_t stream);

}  // namespace ddp::ops::detail
