// SPDX-License-Identifier: Apache-2.0
// JPEG to 8-bit RGB through libjpeg-turbo, for untrusted data. The size is checked before decoding.
// A warning of the decoder (truncated or damaged data) is an error.
#pragma once

#include <cstdint>
#include <vector>

#include "data/images/image_file.hpp"

namespace ddp::detail {

struct RgbImage {
  int width = 0;
  int height = 0;
  std::vector<uint8_t> pixels;  ///< [height, width, 3]
};

/// Reads the header of a JPEG, whose first bytes the caller has checked. Throws CorruptImage (with
/// source) if it is damaged or the image has more than `max_pixels`.
ImageHeader read_jpeg_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                             int64_t max_pixels);

/// Decodes at 1 / `denominator` of the size (1, 2, 4 or 8), rounded up, into `out` (memory is
/// reused). Images of a few pixels are decoded with the largest factor that gives the same size.
/// Call read_jpeg_header first.
void decode_jpeg(const std::vector<uint8_t>& bytes, const DataSource& source, int denominator,
                 RgbImage& out);

/// Decodes `region` of the image at 1 / `denominator` of its size, in pixels of that size, to
/// [region.height, region.width, 3]. The bytes equal decode_jpeg's. If decodes_regions(), little
/// more than the region is decoded. Damage below the region is then not detected, except for a
/// missing end. Call read_jpeg_header first.
void decode_jpeg_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                        int denominator, const CropBox& region, uint8_t* out);
/// Whether this build also found libjpeg-turbo's jpeglib.h.
bool decodes_regions();

}  // namespace ddp::detail
