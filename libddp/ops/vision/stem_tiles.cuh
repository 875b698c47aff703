// SPDX-License-Identifier: Apache-2.0
// An image's rows in shared memory, from which the stem's products read patches, and the sizes of
// the products' tiles.
#pragma once

#include <algorithm>

#include "ops/kernel_types.cuh"
#include "ops/tensor_core.cuh"
#include "ops/vision/stem_kernels.hpp"

namespace ddp::ops::detail {

inline constexpr int kWarp = 32;

/// A filter over three channels.
template <int kFilterSize>
struct StemShape {
  static constexpr int kSize = kFilterSize;
  static constexpr int kStride = kSize == 7 ? 2 : 1;
  static constexpr int kPad = kSize / 2;
  static constexpr int kPatchRow = 3 * kSize;  // values of a patch per image row
  static constexpr int kPatch = kSize * kPatchRow;
};

/// The image rows for some rows of the result, each with zeros on both sides. The left zeros align
/// the image to 16 bytes.
template <typename Shape>
struct Lines {
  static constexpr int kLeft = 16;

  int width, rows, tiles_of_image;
  int vectors = 0;  ///< of 8 values per image row, if copied unchanged

  explicit Lines(const StemProducts& call)
      : width(width_of(call.image.width)),
        rows(call.tile_rows()),
        tiles_of_image((call.image.rows + rows - 1) / rows) {
    const StemImage& image = call.image;
    const bool dense = image.element == call.element && image.strides[1] == 1 &&
                       image.strides[3] == 3 && image.width % 8 == 0 && image.strides[2] % 8 == 0 &&
                       image.strides[0] % 8 == 0 && is_aligned(image.data);
    vectors = dense ? 3 * image.width / 8 : 0;
  }
  static constexpr __host__ __device__ int width_of(int image_width) {
    return (3 * image_width + 2 * kLeft + 7) / 8 * 8;
  }
  static constexpr __host__ __device__ int lines_of(int rows) {
    return Shape::kStride * (rows - 1) + Shape::kSize;
  }
  static bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }
  __host__ __device__ int lines() const { return lines_of(rows); }
  __host__ __device__ int size() const { return lines() * width; }

  /// Offset of a patch's column from the pixel's corner. For all columns 49 / 1024 stands for
  /// 1 / 21, and 114 / 1024 for 1 / 9.
  __device__ int offset(int column) const {
    constexpr int kShare = (1024 + Shape::kPatchRow - 1) / Shape::kPatchRow;
    return column + (column * kShare >> 10) * (width - Shape::kPatchRow);
  }
  __device__ int corner(int pixel, const StemImage& image) const {
    const int first = kLeft - 3 * Shape::kPad;
    return pixel < rows * image.columns ? first + Shape::kStride * (pixel / image.columns * width +
                                                                    3 * (pixel % image.columns))
                                        : first;
  }
};

/// Writes the zeros around the image that load_lines() does not write.
template <int kThreads, typename Shape, typename T>
__device__ void clear_sides(const Lines<Shape>& lines, T* to) {
  const int of_line = lines.width / 8 - lines.vectors, left = Lines<Shape>::kLeft / 8;
  for (int i = static_cast<int>(threadIdx.x); i < lines.lines() * of_line; i += kThreads) {
    const int line = i / of_line, side = i % of_line;
    const int vector = side < left ? side : side + lines.vectors;
    reinterpret_cast<uint4*>(to)[line * (lines.width / 8) + vector] = make_uint4(0, 0, 0, 0);
  }
}

/// Loads a tile's lines. Copies may be pending on return.
template <int kThreads, typename In, typename Shape, typename T>
__device__ void load_lines(const StemImage& image, const Lines<Shape>& lines, int tile, T* to) {
  constexpr int kLeft = Lines<Shape>::kLeft;
  const int first = Shape::kStride * (tile % lines.tiles_of_image * lines.rows) - Shape::kPad;
  const In* in =
      static_cast<const In*>(image.data) + tile / lines.tiles_of_image * image.strides[0];
  if (lines.vectors > 0) {
    const unsigned begin = shared_address(to + kLeft);
    for (int i = static_cast<int>(threadIdx.x); i < lines.lines() * lines.vectors; i += kThreads) {
      const int line = i / lines.vectors, vector = i % lines.vectors, h = first + line;
      const bool inside = h >= 0 && h < image.height;
      copy_async(begin + (line * lines.width + vector * 8) * 2,
                 in + (inside ? h * image.strides[2] + vector * 8 : 0), inside);
    }
    return;
  }
  for (int i = static_cast<int>(threadIdx.x) % kWarp; i < lines.width; i += kWarp) {
    const int value = i - kLeft, w = value / 3;
    const In* column = in + value % 3 * image.strides[1] + w * image.strides[3];
    const bool column_exists = value >= 0 && w < image.width;
#pragma unroll 6
    for (int line = static_cast<int>(threadIdx.x) / kWarp; line < lines.lines();
         line += kThreads / kWarp) {
      const int h = first + line;
      const bool inside = column_exists && h >= 0 && h < image.height;
      to[line * lines.width + i] =
          from_float<T>(inside ? to_float(column[h * image.strides[2]]) : 0.0F);
    }
  }
}

inline constexpr int kFilters = StemProducts::kFilters, kPixels = StemProducts::kPixels;
inline constexpr int kStep = 16;                 // of a product's inner dimension
inline constexpr int kForwardThreads = kPixels;  // a warp makes 32 pixels
inline constexpr int kOutPitch = kFilters + 8;   // no bank conflicts
inline constexpr int kGradThreads = 256;
inline constexpr int kColumnWarps = 4;
inline constexpr int kRowBytes = kFilters * 2;
inline constexpr int kVectors = kRowBytes / 16;

/// The products of one shape.
template <typename Shape>
struct Sizes {
  static constexpr int kSteps = (Shape::kPatch + kStep - 1) / kStep;  // forward
  static constexpr int kFilterPitch = kSteps * kStep + 8;             // no bank conflicts
  /// For the results of four warps, or the unpadded filter.
  static constexpr int kStage =
      std::max(kForwardThreads / kWarp * 16 * kOutPitch, kFilters* Shape::kPatch);
  static constexpr int kTileColumns = 8 * kColumnWarps;
  static constexpr int kColumnTiles =
      (Shape::kPatch + kTileColumns - 1) / kTileColumns;             // of a warp
  static constexpr int kSumPitch = kColumnTiles * kTileColumns + 8;  // no bank conflicts
  // The sums of a large filter need all registers. For a small filter two blocks hide each other's
  // latency.
  static constexpr int kGradBlocks = kColumnTiles > 1 ? 1 : 2;
};

// Default shared memory of a block, and the kernels' use of it with lines of `size` values.
inline constexpr size_t kSharedBytes = 48 << 10;
template <typename Shape>
constexpr size_t forward_bytes(int size) {
  return 2 *
         (static_cast<size_t>(size) + kFilters * Sizes<Shape>::kFilterPitch + Sizes<Shape>::kStage);
}
template <typename Shape>
constexpr size_t gradient_bytes(int size) {
  return std::max(2 * (2 * static_cast<size_t>(size) + kPixels * kRowBytes),
                  sizeof(float) * kFilters * Sizes<Shape>::kSumPitch);
}
template <typename Shape>
constexpr bool fits_shared(int size) {
  return std::max(forward_bytes<Shape>(size),
                  gradient_bytes<Shape>(size) + kPixels * sizeof(int)) <= kSharedBytes;
}

/// Whether all images of up to kMaxSide pixels per side, with rows that fit a tile, fit.
template <typename Shape>
constexpr bool small_images_fit() {
  constexpr int kMaxSide = StemProducts::kMaxSide, kStride = Shape::kStride;
  for (int width = 1; width <= kMaxSide; ++width) {
    const int columns = (width - 1) / kStride + 1;
    const int rows = std::min(kPixels / columns, (kMaxSide - 1) / kStride + 1);
    if (columns * 4 <= kPixels &&
        !fits_shared<Shape>(Lines<Shape>::lines_of(rows) * Lines<Shape>::width_of(width))) {
      return false;
    }
  }
  return true;
}
static_assert(small_images_fit<StemShape<7>>() && small_images_fit<StemShape<3>>());

}  // namespace ddp::ops::detail
