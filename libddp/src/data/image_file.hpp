// SPDX-License-Identifier: Apache-2.0
// An image file, JPEG or PNG, detected by its first bytes and not by its name.
#pragma once

#include <cstdint>
#include <vector>

#include "data/jpeg.hpp"

namespace ddp::detail {

struct ImageHeader {
  int width = 0;
  int height = 0;
  int largest_denominator = 1;  ///< decodable at 1 / 1, 1 / 2 … 1 / this of its size
};

/// Reads the header. Throws CorruptImage (with source) for anything but an image of at most
/// `max_pixels`.
ImageHeader read_image_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                              int64_t max_pixels);

/// Decodes a part of the image at 1 / `denominator` of its size, as decode_jpeg_region does. Call
/// read_image_header first.
void decode_image_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                         int denominator, const CropBox& region, uint8_t* out);

}  // namespace ddp::detail
