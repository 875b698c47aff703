// SPDX-License-Identifier: Apache-2.0
// Non-owning view of decoded pixels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "data/augmentation.hpp"

namespace ddp::detail {

/// 8-bit RGB pixels, [height, width, 3], not owned: an image, or its part from column x, row y on.
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
