// SPDX-License-Identifier: Apache-2.0
#include "data/image_file.hpp"

#include "data/png.hpp"
#include "ddp/detail/check.hpp"

namespace ddp::detail {

ImageHeader read_image_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                              int64_t max_pixels) {
  if (is_png(bytes)) {
    const auto [width, height] = read_png_header(bytes, source, max_pixels);
    return {width, height, 1};
  }
  const auto [width, height] = read_jpeg_header(bytes, source, max_pixels);
  return {width, height, 8};
}

void decode_image_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                         int denominator, const CropBox& region, uint8_t* out) {
  if (is_png(bytes)) {
    DDP_CHECK(denominator == 1, "a PNG is decoded at its own size alone");
    decode_png_region(bytes, source, region, out);
  } else {
    decode_jpeg_region(bytes, source, denominator, region, out);
  }
}

}  // namespace ddp::detail
