// SPDX-License-Identifier: Apache-2.0
// The formats of image files, each decoded by one library in one source.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "data/images/image_file.hpp"

namespace ddp::detail {

/// How files of one format are recognised and decoded. image_file.hpp describes the functions.
struct ImageFormat {
  const char* name;             ///< "PNG"
  const char* first_bytes;      ///< for messages: "89 50 4e 47"
  int largest_denominator = 1;  ///< decodable at 1 / 1, 1 / 2 … 1 / this of the size
  bool (*has_extension)(std::string_view extension);
  bool (*recognises)(const std::vector<uint8_t>& bytes);
  /// In builds without the library: follows the name of a file in messages. The functions below
  /// are then not set.
  const char* why_unsupported = nullptr;
  ImageHeader (*read_header)(const std::vector<uint8_t>& bytes, const DataSource& source,
                             int64_t max_pixels) = nullptr;
  void (*decode_region)(const std::vector<uint8_t>& bytes, const DataSource& source,
                        int denominator, const CropBox& region, uint8_t* out) = nullptr;
};

extern const ImageFormat kJpegFormat;  // jpeg.cpp
extern const ImageFormat kPngFormat;   // png.cpp
extern const ImageFormat kWebpFormat;  // webp.cpp

/// All formats. The first one that a file's bytes fit decodes the file.
inline constexpr const ImageFormat* kImageFormats[] = {&kJpegFormat, &kPngFormat, &kWebpFormat};

}  // namespace ddp::detail
