// SPDX-License-Identifier: Apache-2.0
// JPEG to 8-bit RGB through libjpeg-turbo, for data that comes from anywhere: the size is checked
// before anything is decoded, and a warning of the decoder (truncated or damaged data) is an error.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/data/augmentation.hpp"

namespace ddp::detail {

/// An image that is no JPEG, is damaged, or is too large: what data.corrupt=skip passes over.
struct CorruptImage : DataError {
  using DataError::DataError;
};

/// Where bytes came from, for messages.
struct DataSource {
  const std::string& path;
  int64_t offset = 0;
  /// "data/train-000.tar at offset 1536".
  std::string to_string() const;
};

struct RgbImage {
  int width = 0;
  int height = 0;
  std::vector<uint8_t> pixels;  ///< [height, width, 3]
};

struct JpegHeader {
  int width = 0;
  int height = 0;
};

/// Reads the header. Throws DataError (with source) for what is no JPEG, or has more than
/// `max_pixels`.
JpegHeader read_jpeg_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                            int64_t max_pixels);

/// Decodes at 1 / `denominator` of the size (1, 2, 4 or 8), rounded up, into `out` (memory is
/// reused). Call read_jpeg_header first. One decoder a thread is kept.
void decode_jpeg(const std::vector<uint8_t>& bytes, const DataSource& source, int denominator,
                 RgbImage& out);

/// Decodes a part of the image at 1 / `denominator` of its size, in pixels of that size, to
/// [region.height, region.width, 3]: the bytes that decode_jpeg gives there. Where
/// decodes_regions(), little more than the part is decoded, and damage below it is not noticed,
/// but for a missing end. Call read_jpeg_header first.
void decode_jpeg_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                        int denominator, const CropBox& region, uint8_t* out);
/// Tells once in a process why loader.jpeg_decoder=nvjpeg is not what happens, or no more.
void say_cpu_decodes(const std::string& reason);
/// Whether this build found libjpeg-turbo's jpeglib.h beside turbojpeg.h.
bool decodes_regions();

}  // namespace ddp::detail
