// SPDX-License-Identifier: Apache-2.0
// Decoded pixels that somebody else owns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ddp/data/augmentation.hpp"

namespace ddp::detail {

/// 8-bit RGB in memory that somebody else owns, [height, width, 3]: an image, or the part of one
/// that begins at column x, row y.
struct ImageView {
  const uint8_t* pixels = nullptr;
  int width = 0;
  int height = 0;
  int x = 0;
  int y = 0;
};

/// Copies a part of a whole image to [region.height, region.width, 3].
inline void copy_region(const ImageView& image, const CropBox& region, uint8_t* out) {
  const size_t row = static_cast<size_t>(region.width) * 3;
  for (int y = 0; y < region.height; ++y) {
    const auto from =
        static_cast<size_t>(region.y + y) * static_cast<size_t>(image.width) + size_t(region.x);
    std::memcpy(out + static_cast<size_t>(y) * row, image.pixels + from * 3, row);
  }
}

}  // namespace ddp::detail
