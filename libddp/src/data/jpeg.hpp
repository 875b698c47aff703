// SPDX-License-Identifier: Apache-2.0
// JPEG to 8-bit RGB through libjpeg-turbo, for untrusted data. The size is checked before decoding.
// A warning of the decoder (truncated or damaged data) is an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "data/augmentation.hpp"
#include "ddp/core/error.hpp"

namespace ddp::detail {

/// The error for a damaged, too large or unsupported image, which data.corrupt=skip skips.
struct CorruptImage : DataError {
  using DataError::DataError;
};

/// The origin of bytes, for messages.
struct DataSource {
  const std::string& path;
  int64_t offset = 0;
  /// "data/train-000.tar at offset 1536".
  std::string to_string() const;
};

/// Throws CorruptImage. `kind` is "PNG".
[[noreturn]] void fail_image(const char* kind, const DataSource& source, size_t num_bytes,
                             const std::string& why);
/// Throws CorruptImage unless an image of `num_bytes` has 1 to `max_pixels` pixels.
void check_pixels(const char* kind, const DataSource& source, size_t num_bytes, int64_t width,
                  int64_t height, int64_t max_pixels);

struct RgbImage {
  int width = 0;
  int height = 0;
  std::vector<uint8_t> pixels;  ///< [height, width, 3]
};

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

struct ImageHeader {
  int width = 0;
  int height = 0;
  int largest_denominator = 1;  ///< decodable at 1 / 1, 1 / 2 … 1 / this of its size
};

/// Reads the header of a JPEG, whose first bytes the caller has checked. Throws CorruptImage (with
/// source) if it is damaged or the image has more than `max_pixels`.
ImageHeader read_jpeg_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                             int64_t max_pixels);

/// Decodes at 1 / `denominator` of the size (1, 2, 4 or 8), rounded up, into `out` (memory is
/// reused). Call read_jpeg_header first. Each thread keeps a decoder.
void decode_jpeg(const std::vector<uint8_t>& bytes, const DataSource& source, int denominator,
                 RgbImage& out);

/// Decodes `region` of the image at 1 / `denominator` of its size, in pixels of that size, to
/// [region.height, region.width, 3]. The bytes equal decode_jpeg's. If decodes_regions(), little
/// more than the region is decoded. Damage below the region is then not detected, except for a
/// missing end. Call read_jpeg_header first.
void decode_jpeg_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                        int denominator, const CropBox& region, uint8_t* out);
/// Logs once per process why the CPU decodes although loader.jpeg_decoder=nvjpeg is set.
void warn_cpu_decodes(const std::string& reason);
/// Whether this build also found libjpeg-turbo's jpeglib.h.
bool decodes_regions();

}  // namespace ddp::detail
