// SPDX-License-Identifier: Apache-2.0
// JPEG to 8-bit RGB through libjpeg-turbo, for data that comes from anywhere: the size is checked
// before anything is decoded, and a warning of the decoder (truncated or damaged data) is an error.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ddp/core/error.hpp"

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

}  // namespace ddp::detail
