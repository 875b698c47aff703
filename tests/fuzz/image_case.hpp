// SPDX-License-Identifier: Apache-2.0
// Decoding of whole images and of regions, for the targets of image formats.
#pragma once

#include <algorithm>
#include <vector>

#include "data/images/image_file.hpp"
#include "data/images/jpeg.hpp"
#include "fuzz/fuzz.hpp"

namespace fuzz {

inline constexpr int64_t kMaxPixels = 1 << 16;
inline const std::string kPath = "input";
inline const ddp::detail::DataSource kSource{kPath};

/// The middle of an image.
inline ddp::CropBox middle(int width, int height) {
  return {width / 4, height / 4, std::max(1, width / 2), std::max(1, height / 2)};
}

inline std::vector<uint8_t> decode(const std::vector<uint8_t>& bytes, int denominator,
                                   const ddp::CropBox& region) {
  std::vector<uint8_t> pixels(static_cast<std::size_t>(region.width) *
                              static_cast<std::size_t>(region.height) * 3);
  ddp::detail::decode_image_region(bytes, kSource, denominator, region, pixels.data());
  return pixels;
}

/// The region of an image that can be decoded whole has the same pixels.
inline void compare_region(const std::vector<uint8_t>& bytes, int denominator,
                           const ddp::detail::RgbImage& whole) {
  const auto region = middle(whole.width, whole.height);
  std::vector<uint8_t> expected(static_cast<std::size_t>(region.width) *
                                static_cast<std::size_t>(region.height) * 3);
  ddp::detail::copy_region({whole.pixels.data(), whole.width, whole.height}, region,
                           expected.data());
  require(decode(bytes, denominator, region) == expected, "a region equals the whole's part");
}

/// Like the loader: of a damaged image too.
inline void decode_region_alone(const std::vector<uint8_t>& bytes) {
  (void)accepts([&] {
    const auto size = ddp::detail::read_image_header(bytes, kSource, kMaxPixels);
    (void)decode(bytes, 1, middle(size.width, size.height));
    (void)decode(bytes, 1, {0, 0, size.width, size.height});
  });
}

}  // namespace fuzz
