// SPDX-License-Identifier: Apache-2.0
// Tiles of the stem's products and their shared memory.
#pragma once

#include <algorithm>

#include "ops/vision/stem_lines.cuh"

namespace ddp::ops::detail {

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
