// SPDX-License-Identifier: Apache-2.0
#include "data/images/image_file.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <iterator>
#include <string>

#include "data/images/image_formats.hpp"
#include "ddp/detail/check.hpp"
#include "ddp/detail/file_content.hpp"

namespace ddp::detail {

namespace {

constexpr std::array<std::string_view, 5> kNotRead = {"bmp", "pgm", "ppm", "tif", "tiff"};

template <typename Predicate>
const ImageFormat* find_image_format(Predicate is_wanted) {
  const auto* found = std::ranges::find_if(kImageFormats, is_wanted);
  return found != std::end(kImageFormats) ? *found : nullptr;
}

const ImageFormat* format_of(const std::vector<uint8_t>& bytes) {
  return find_image_format([&](const ImageFormat* format) { return format->recognises(bytes); });
}

const ImageFormat* format_of_extension(std::string_view extension) {
  return find_image_format(
      [&](const ImageFormat* format) { return format->has_extension(extension); });
}

std::string first_bytes(const std::vector<uint8_t>& bytes) {
  std::string text;
  for (size_t i = 0; i < bytes.size() && i < 4; ++i) {
    char hex[4];
    std::snprintf(hex, sizeof(hex), "%02x ", bytes[i]);
    text += hex;
  }
  if (text.empty()) {
    return "is empty";
  }
  return "starts with " + text.substr(0, text.size() - 1) +
         content_note({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

// "not a JPEG, PNG or WebP image (is empty; a JPEG starts with ff d8, a PNG with 89 50 4e 47, …)".
std::string unknown_format(const std::vector<uint8_t>& bytes) {
  std::string names, starts;
  for (const ImageFormat* format : kImageFormats) {
    const bool is_first = names.empty();
    const bool is_last = format == *std::rbegin(kImageFormats);
    names += concat(is_first ? "" : (is_last ? " or " : ", "), format->name);
    starts += concat(is_first ? "" : ", ", "a ", format->name,
                     is_first ? " starts with " : " with ", format->first_bytes);
  }
  return concat("not a ", names, " image (", first_bytes(bytes), "; ", starts, ")");
}

}  // namespace

std::string DataSource::to_string() const {
  return concat(path, " at offset ", offset);
}

void fail_image(const char* kind, const DataSource& source, size_t num_bytes,
                const std::string& why) {
  throw CorruptImage(concat(source.to_string(), ": corrupt or truncated ", kind, " of ", num_bytes,
                            " bytes: ", why));
}

void check_pixels(const char* kind, const DataSource& source, size_t num_bytes, int64_t width,
                  int64_t height, int64_t max_pixels) {
  if (width < 1 || height < 1 || width > INT32_MAX || height > INT32_MAX) {
    fail_image(kind, source, num_bytes, "its size is invalid");
  }
  if (width > max_pixels / height) {
    throw CorruptImage(concat(source.to_string(), ": ", kind, " of ", width, " x ", height,
                              " pixels; data.max_pixels allows ", max_pixels));
  }
}

FileKind kind_of_extension(std::string_view extension) {
  if (const ImageFormat* format = format_of_extension(extension)) {
    return format->why_unsupported == nullptr ? FileKind::Image : FileKind::UnsupportedImage;
  }
  return std::find(kNotRead.begin(), kNotRead.end(), extension) != kNotRead.end()
             ? FileKind::UnsupportedImage
             : FileKind::Other;
}

const char* why_unsupported(std::string_view extension) {
  if (const ImageFormat* format = format_of_extension(extension)) {
    return format->why_unsupported;
  }
  return ": images of this kind are not read; fix: convert them to .jpg, .png or .webp, or move "
         "them out of the data set";
}

ImageHeader read_image_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                              int64_t max_pixels) {
  const ImageFormat* format = format_of(bytes);
  if (format == nullptr) {
    throw CorruptImage(concat(source.to_string(), ": ", unknown_format(bytes)));
  }
  if (format->why_unsupported != nullptr) {
    throw SettingsError(source.to_string() + format->why_unsupported);
  }
  ImageHeader header = format->read_header(bytes, source, max_pixels);
  header.largest_denominator = format->largest_denominator;
  return header;
}

void decode_image_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                         int denominator, const CropBox& region, uint8_t* out) {
  const ImageFormat* format = format_of(bytes);
  DDP_CHECK(format != nullptr && denominator <= format->largest_denominator,
            "this image is not decoded at 1 / ", denominator, " of its size");
  format->decode_region(bytes, source, denominator, region, out);
}

void make_grey(uint8_t* pixels, size_t num_pixels) {
  for (uint8_t* p = pixels; p != pixels + num_pixels * 3; p += 3) {
    // Pillow's weights of ITU-R 601-2, with 16 fractional bits; their sum is 1 << 16.
    const unsigned luma = (p[0] * 19595u + p[1] * 38470u + p[2] * 7471u + 0x8000u) >> 16;
    std::fill_n(p, 3, static_cast<uint8_t>(luma));
  }
}

}  // namespace ddp::detail
