// SPDX-License-Identifier: Apache-2.0
// An image file, JPEG, PNG or WebP, detected by its first bytes and not by its name. Data is
// untrusted: the size is checked before decoding, and damage is an error.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "data/jpeg.hpp"

namespace ddp::detail {

/// What a file's extension says about its contents.
enum class FileKind {
  Image,             ///< one that is decoded here
  UnsupportedImage,  ///< one that only torchvision's ImageFolder or builds with libwebp read
  Other
};
/// `extension` in lower case, without the dot.
FileKind kind_of_extension(std::string_view extension);
/// Follows the name of an UnsupportedImage in messages.
const char* why_unsupported(std::string_view extension);

/// Reads the header. Throws CorruptImage (with source) for anything but an image of at most
/// `max_pixels`.
ImageHeader read_image_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                              int64_t max_pixels);

/// Decodes `region` of the image at 1 / `denominator` of its size, as decode_jpeg_region does. Any
/// image becomes 8-bit RGB as in Pillow's convert("RGB"): grey values and palettes are expanded,
/// transparency is dropped, and 16-bit values keep their upper 8 bits (16-bit grey without an
/// alpha channel: those above 255 become 255). Call read_image_header first.
void decode_image_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                         int denominator, const CropBox& region, uint8_t* out);

/// Replaces the three values of each pixel with its luma, as in Pillow's convert("L").
void make_grey(uint8_t* pixels, size_t num_pixels);

}  // namespace ddp::detail
