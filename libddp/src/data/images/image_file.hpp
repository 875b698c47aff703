// SPDX-License-Identifier: Apache-2.0
// An image file of one of kImageFormats, detected by its first bytes and not by its name. Data is
// untrusted: the size is checked before decoding, and damage is an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "data/images/augmentation.hpp"
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
/// `max_pixels`, and SettingsError for a format whose library this build lacks.
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
