// SPDX-License-Identifier: Apache-2.0
// PNG through libpng and WebP through libwebp, to 8-bit RGB. image_file.hpp describes the
// functions. Both decode the whole image, at its own size only.
#pragma once

#include <cstdint>
#include <vector>

#include "data/jpeg.hpp"

namespace ddp::detail {

bool is_png(const std::vector<uint8_t>& bytes);
ImageHeader read_png_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                            int64_t max_pixels);
void decode_png_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                       const CropBox& region, uint8_t* out);

/// In builds without libwebp the other two functions throw SettingsError.
bool is_webp(const std::vector<uint8_t>& bytes);
ImageHeader read_webp_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                             int64_t max_pixels);
void decode_webp_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                        const CropBox& region, uint8_t* out);

}  // namespace ddp::detail
