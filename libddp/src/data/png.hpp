// SPDX-License-Identifier: Apache-2.0
// PNG to 8-bit RGB through libpng, for untrusted data. The size is checked before decoding; damage
// is an error.
#pragma once

#include <cstdint>
#include <vector>

#include "data/jpeg.hpp"

namespace ddp::detail {

/// Whether `bytes` begins with the PNG signature.
bool is_png(const std::vector<uint8_t>& bytes);

/// Reads width and height. Throws CorruptImage (with source) for a damaged header or more than
/// `max_pixels`.
JpegHeader read_png_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                           int64_t max_pixels);

/// Decodes the whole image and writes `region` to [region.height, region.width, 3]. Every kind
/// becomes 8-bit RGB as in Pillow's convert("RGB"): palettes are looked up, transparency is
/// dropped, and 16-bit values keep their upper 8 bits (also 16-bit grey, which Pillow clips). Call
/// read_png_header first.
void decode_png_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                       const CropBox& region, uint8_t* out);

}  // namespace ddp::detail
