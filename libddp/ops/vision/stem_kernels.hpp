// SPDX-License-Identifier: Apache-2.0
// Kernels of stem_convolution: raw pointers, no LibTorch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/kernel_types.hpp"
#include "ops/vision/tap_kernels.hpp"

namespace ddp::ops::detail {

/// Columns of a patch's row: 7 x 7 x 3, padded to a multiple of 8.
inline constexpr int kStemPatch = 147;
inline constexpr int kStemPatchColumns = 152;

/// [batch, 3, height, width] with strides in elements.
struct StemImage {
  const void* data;
  Element element;
  int batch, height, width;
  int64_t strides[4];
  int rows, columns;  ///< of the convolution's result
};

/// [filters, 3, size, size] with strides in elements.
struct StemFilter {
  void* data;
  Element element;
  int filters;
  int64_t strides[4];
};

enum class StemPacking { SpaceToDepth, Im2col };

/// out [batch, rows + 3, columns + 3, 16] of bf16 or fp16.
cudaError_t launch_stem_space_to_depth(const StemImage& image, void* out, Element out_element,
                                       cudaStream_t stream);
/// out [batch * rows * columns, kStemPatchColumns]; the image needs stem_patches_fit().
cudaError_t launch_stem_patches(const StemImage& image, void* out, Element out_element,
                                cudaStream_t stream);
/// Whether an image of that size fits in a block's shared memory.
bool stem_patches_fit(int64_t height, int64_t width);

/// packed [filters, 4, 4, 16] or [filters, kStemPatchColumns] of bf16 or fp16.
cudaError_t launch_stem_pack_filter(const StemFilter& filter, StemPacking packing, void* packed,
                                    Element packed_element, cudaStream_t stream);
/// The inverse: writes or adds to `filter`.
cudaError_t launch_stem_unpack_filter(const StemFilter& filter, StemPacking packing,
                                      const void* packed, Element packed_element, bool accumulates,
                                      cudaStream_t stream);

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

/// Adds the partial sums in a fixed order: partial [splits, filters, size, size, channels]. The
/// result is written or added to `filter`, whose number of elements is a multiple of four.
cudaError_t launch_sum_parts(const float* partial, int splits, int size, const TapFilter& filter,
                             bool accumulates, cudaStream_t stream);

}  // namespace ddp::ops::detail
