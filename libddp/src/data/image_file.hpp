// SPDX-License-Identifier: Apache-2.0
// An image file, JPEG or PNG, detected by its first bytes and not by its name. JPEG is decoded by
// jpeg.hpp; PNG is decoded here through libpng. Data is untrusted: the size is checked before
// decoding, and damage is an error.
#pragma once

#include <cstdint>
#include <vector>

#include "data/jpeg.hpp"

namespace ddp::detail {

/// Reads the header. Throws CorruptImage (with source) for anything but an image of at most
/// `max_pixels`.
ImageHeader read_image_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                              int64_t max_pixels);

/// Decodes `region` of the image at 1 / `denominator` of its size, as decode_jpeg_region does.
/// Every kind of PNG becomes 8-bit RGB as in Pillow's convert("RGB"): palettes are looked up,
/// transparency is dropped, and 16-bit values keep their upper 8 bits (also 16-bit grey, which
/// Pillow clips). Call read_image_header first.
void decode_image_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                         int denominator, const CropBox& region, uint8_t* out);

}  // namespace ddp::detail
