// SPDX-License-Identifier: Apache-2.0
// PNG through libpng and WebP through libwebp, to 8-bit RGB. image_file.hpp describes the
// functions. Both decode the whole image, at its own size only.
#pragma once

#include <cstdint>
#include <vector>

#include "data/images/image_file.hpp"

namespace ddp::detail {

bool is_png(const std::vector<uint8_t>& bytes);
ImageHeader read_png_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                            int64_t max_pixels);
void decode_png_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                       const CropBox& region, uint8_t* out);

/// Whether this build has libwebp. Without it the next functions throw SettingsError.
bool reads_webp();
/// Follows the name of a WebP image in messages of builds without libwebp.
inline constexpr const char* kNoWebp =
    ": a WebP image, but libddp was built without libwebp; fix: install libwebp-dev and build "
    "again, or convert the image to JPEG or PNG";
bool is_webp(const std::vector<uint8_t>& bytes);
ImageHeader read_webp_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                             int64_t max_pixels);
void decode_webp_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                        const CropBox& region, uint8_t* out);

}  // namespace ddp::detail
