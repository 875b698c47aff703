// SPDX-License-Identifier: Apache-2.0
#include "data/images/image_file.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>

#include "data/images/jpeg.hpp"
#include "data/images/other_images.hpp"
#include "ddp/detail/check.hpp"
#include "ddp/detail/file_content.hpp"

namespace ddp::detail {

namespace {

constexpr std::array<std::string_view, 4> kRead = {"jpg", "jpeg", "png", "webp"};
constexpr std::array<std::string_view, 5> kNotRead = {"bmp", "pgm", "ppm", "tif", "tiff"};

bool is_jpeg(const std::vector<uint8_t>& bytes) {
  return bytes.size() >= 4 && bytes[0] == 0xff && bytes[1] == 0xd8;
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
  if (extension == "webp" && !reads_webp()) {
    return FileKind::UnsupportedImage;
  }
  if (std::find(kRead.begin(), kRead.end(), extension) != kRead.end()) {
    return FileKind::Image;
  }
  return std::find(kNotRead.begin(), kNotRead.end(), extension) != kNotRead.end()
             ? FileKind::UnsupportedImage
             : FileKind::Other;
}

const char* why_unsupported(std::string_view extension) {
  return extension == "webp" ? kNoWebp
                             : ": images of this kind are not read; fix: convert them to .jpg, "
                               ".png or .webp, or move them out of the data set";
}

ImageHeader read_image_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                              int64_t max_pixels) {
  if (is_jpeg(bytes)) {
    return read_jpeg_header(bytes, source, max_pixels);
  }
  if (is_png(bytes)) {
    return read_png_header(bytes, source, max_pixels);
  }
  if (is_webp(bytes)) {
    return read_webp_header(bytes, source, max_pixels);
  }
  throw CorruptImage(concat(source.to_string(), ": not a JPEG, PNG or WebP image (",
                            first_bytes(bytes),
                            "; a JPEG starts with ff d8, a PNG with 89 50 4e 47, a WebP with "
                            "52 49 46 46, four other bytes and 57 45 42 50)"));
}

void decode_image_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                         int denominator, const CropBox& region, uint8_t* out) {
  if (is_jpeg(bytes)) {
    decode_jpeg_region(bytes, source, denominator, region, out);
    return;
  }
  DDP_CHECK(denominator == 1, "only a JPEG is decoded at a fraction of its size");
  if (is_png(bytes)) {
    decode_png_region(bytes, source, region, out);
  } else {
    decode_webp_region(bytes, source, region, out);
  }
}

void make_grey(uint8_t* pixels, size_t num_pixels) {
  for (uint8_t* p = pixels; p != pixels + num_pixels * 3; p += 3) {
    // Pillow's weights of ITU-R 601-2, with 16 fractional bits; their sum is 1 << 16.
    const unsigned luma = (p[0] * 19595u + p[1] * 38470u + p[2] * 7471u + 0x8000u) >> 16;
    std::fill_n(p, 3, static_cast<uint8_t>(luma));
  }
}

}  // namespace ddp::detail
