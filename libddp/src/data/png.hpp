// SPDX-License-Identifier: Apache-2.0
// PNG to 8-bit RGB through libpng, for data that comes from anywhere: the size is checked before
// anything is decoded, and damage is an error.
#pragma once

#include <cstdint>
#include <vector>

#include "data/jpeg.hpp"

namespace ddp::detail {

/// Whether `bytes` begins as a PNG file does.
bool is_png(const std::vector<uint8_t>& bytes);

/// Width and height. Throws CorruptImage (with source) for a damaged header, and for more than
/// `max_pixels`.
JpegHeader read_png_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                           int64_t max_pixels);

/// Decodes all of the image and writes a part of it to [region.height, region.width, 3]. Every kind
/// becomes 8-bit RGB as in Pillow's convert("RGB"): palettes are looked up, of 16 bits the upper 8
/// stay (of 16-bit grey too, which Pillow clips), and transparency is left out. Call
/// read_png_header first.
void decode_png_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                       const CropBox& region, uint8_t* out);

}  // namespace ddp::detail
