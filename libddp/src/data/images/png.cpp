// SPDX-License-Identifier: Apache-2.0
#include <png.h>
#include <setjmp.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "data/images/image_formats.hpp"
#include "data/sources/data_file.hpp"
#include "ddp/detail/check.hpp"

namespace ddp::detail {

namespace {

constexpr std::array<uint8_t, 8> kPngSignature = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
// Signature, length and name of the first chunk, width, height.
constexpr size_t kPngHeaderBytes = 24;
// Text and colour profiles are compressed: a small file must not expand to gigabytes. libpng keeps
// one text chunk less than the second limit.
constexpr png_alloc_size_t kMaxChunkBytes = 8 << 20;
constexpr png_uint_32 kMaxChunks = 2;

// libpng's reader over bytes in memory. Errors longjmp.
struct PngReader {
  const uint8_t* at;
  size_t left;
  std::string message;
  bool is_grey16 = false;
  png_structp png = nullptr;
  png_infop info = nullptr;

  explicit PngReader(const std::vector<uint8_t>& bytes) : at(bytes.data()), left(bytes.size()) {
    png = png_create_read_struct(PNG_LIBPNG_VER_STRING, this, &PngReader::fail,
                                 [](png_structp, png_const_charp) {});
    info = png != nullptr ? png_create_info_struct(png) : nullptr;
    DDP_CHECK(info != nullptr, "libpng cannot create a decoder");
  }
  ~PngReader() { png_destroy_read_struct(&png, &info, nullptr); }
  PngReader(const PngReader&) = delete;
  PngReader& operator=(const PngReader&) = delete;

  [[noreturn]] static void fail(png_structp png, png_const_charp text) {
    static_cast<PngReader*>(png_get_error_ptr(png))->message = text;
    png_longjmp(png, 1);
  }
  static void read(png_structp png, png_bytep out, size_t num_bytes) {
    auto* self = static_cast<PngReader*>(png_get_io_ptr(png));
    if (num_bytes > self->left) {
      png_error(png, "the file ends early");
    }
    std::memcpy(out, self->at, num_bytes);
    self->at += num_bytes;
    self->left -= num_bytes;
  }
};

// Errors longjmp out of this function, so no local may have a destructor.
bool decode_png(PngReader& reader, const ImageHeader& size, uint8_t** rows) {
  png_structp png = reader.png;
  if (setjmp(png_jmpbuf(png)) != 0) {
    return false;
  }
  png_set_read_fn(png, &reader, &PngReader::read);
  png_set_user_limits(png, static_cast<png_uint_32>(size.width),
                      static_cast<png_uint_32>(size.height));
  png_set_chunk_malloc_max(png, kMaxChunkBytes);
  png_set_chunk_cache_max(png, kMaxChunks);
  // A wrong checksum is damage in every chunk, as in Pillow. By default libpng skips such a chunk
  // if the image can be decoded without it.
  png_set_crc_action(png, PNG_CRC_NO_CHANGE, PNG_CRC_ERROR_QUIT);
  png_read_info(png, reader.info);
  reader.is_grey16 = png_get_color_type(png, reader.info) == PNG_COLOR_TYPE_GRAY &&
                     png_get_bit_depth(png, reader.info) == 16;
  png_set_expand(png);
  if (!reader.is_grey16) {
    png_set_strip_16(png);
    png_set_gray_to_rgb(png);
  }
  png_set_strip_alpha(png);
  (void)png_set_interlace_handling(png);
  png_read_update_info(png, reader.info);
  if (png_get_rowbytes(png, reader.info) !=
      static_cast<size_t>(size.width) * (reader.is_grey16 ? 2 : 3)) {
    png_error(png, "its rows have an unknown layout");
  }
  png_read_image(png, rows);
  png_read_end(png, nullptr);
  return true;
}

// Pillow limits 16-bit grey values to 255. Expands a row in place, from its end.
void clip_grey16(uint8_t* row, int width) {
  for (ptrdiff_t x = width - 1; x >= 0; --x) {
    const uint8_t value = row[2 * x] == 0 ? row[2 * x + 1] : 255;
    std::fill_n(row + 3 * x, 3, value);
  }
}

bool is_png(const std::vector<uint8_t>& bytes) {
  return bytes.size() >= 4 && std::equal(bytes.begin(), bytes.begin() + 4, kPngSignature.begin());
}

ImageHeader read_png_header(const std::vector<uint8_t>& bytes, const DataSource& source,
                            int64_t max_pixels) {
  if (bytes.size() < kPngHeaderBytes ||
      !std::equal(kPngSignature.begin(), kPngSignature.end(), bytes.begin()) ||
      std::memcmp(bytes.data() + 12, "IHDR", 4) != 0) {
    fail_image("PNG", source, bytes.size(), "it has no header");
  }
  const int64_t width = big_endian_32(bytes.data() + 16), height = big_endian_32(bytes.data() + 20);
  check_pixels("PNG", source, bytes.size(), width, height, max_pixels);
  return {static_cast<int>(width), static_cast<int>(height)};
}

void decode_png_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                       int /*denominator*/, const CropBox& region, uint8_t* out) {
  thread_local std::vector<uint8_t> pixels;
  thread_local std::vector<uint8_t*> rows;
  const ImageHeader size = read_png_header(bytes, source, INT64_MAX);
  const size_t row_bytes = static_cast<size_t>(size.width) * 3;
  pixels.resize(row_bytes * static_cast<size_t>(size.height));
  rows.resize(static_cast<size_t>(size.height));
  for (size_t y = 0; y < rows.size(); ++y) {
    rows[y] = pixels.data() + y * row_bytes;
  }
  PngReader reader(bytes);
  if (!decode_png(reader, size, rows.data())) {
    fail_image("PNG", source, bytes.size(), reader.message);
  }
  if (reader.is_grey16) {
    for (uint8_t* row : rows) {
      clip_grey16(row, size.width);
    }
  }
  copy_region({pixels.data(), size.width, size.height}, region, out);
}

}  // namespace

constinit const ImageFormat kPngFormat = {
    .name = "PNG",
    .first_bytes = "89 50 4e 47",
    .has_extension = [](std::string_view extension) { return extension == "png"; },
    .recognises = is_png,
    .read_header = read_png_header,
    .decode_region = decode_png_region};

}  // namespace ddp::detail
