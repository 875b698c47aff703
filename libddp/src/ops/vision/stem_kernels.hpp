// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ops/kernel_types.hpp"

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

}  // namespace ddp::ops::detail
