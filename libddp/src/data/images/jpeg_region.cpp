// SPDX-License-Identifier: Apache-2.0
// Decodes a region of a JPEG image through libjpeg-turbo's older interface, which can skip rows and
// columns. Bits of skipped rows above must still be read, but not transformed, upsampled or
// converted. Data after the last row is not read.
#include <cstring>
#include <vector>

#include "data/images/jpeg.hpp"
#include "ddp/core/error.hpp"

#ifdef DDP_HAS_LIBJPEG
#include <setjmp.h>

#include <cstdio>
// jpeglib.h needs <cstdio> before it.
#include <jerror.h>
#include <jpeglib.h>

#include <algorithm>
#include <iterator>
#include <utility>
#endif

namespace ddp::detail {

#ifdef DDP_HAS_LIBJPEG
namespace {

// Chroma upsampling reads a pixel's neighbours and repeats the border of the decoded region. This
// many extra columns make the region equal to the same part of the whole image.
constexpr int kMargin = 4;

// The library's own error manager prints to stderr, and in distributions' static libraries it
// cannot be linked into a shared library. So it is not used.
constexpr const char* kMessages[] = {
#define JCOPYRIGHT_SHORT ""  // from a header that is not installed
#define JVERSION ""
#define JMESSAGE(code, text) text,
#include <jerror.h>
};

// A decoder of one image. It keeps the tables that it reads, so a second image without tables of
// its own would be decoded with the first one's.
struct Decompressor {
  jpeg_decompress_struct info{};
  jpeg_error_mgr errors{};
  jmp_buf on_error;
  char message[JMSG_LENGTH_MAX] = {};

  Decompressor() {
    info.err = &errors;
    errors.error_exit = [](j_common_ptr common) { fail(common); };
    errors.output_message = [](j_common_ptr) {};
    errors.reset_error_mgr = [](j_common_ptr common) { common->err->num_warnings = 0; };
    errors.format_message = [](j_common_ptr common, char* text) { format(*common->err, text); };
    // A warning means damaged or missing data.
    errors.emit_message = [](j_common_ptr common, int level) {
      if (level < 0) {
        fail(common);
      }
    };
    info.client_data = this;
  }
  ~Decompressor() { jpeg_destroy_decompress(&info); }
  Decompressor(const Decompressor&) = delete;
  Decompressor& operator=(const Decompressor&) = delete;

  static void format(const jpeg_error_mgr& error, char* text) {
    const auto code = static_cast<size_t>(error.msg_code);
    const char* pattern = code < std::size(kMessages) ? kMessages[code] : "unknown error";
    if (std::strstr(pattern, "%s") != nullptr) {
      std::snprintf(text, JMSG_LENGTH_MAX, "%s", pattern);
    } else {
      const int* i = error.msg_parm.i;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
#pragma GCC diagnostic ignored "-Wformat-security"
      std::snprintf(text, JMSG_LENGTH_MAX, pattern, i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7]);
#pragma GCC diagnostic pop
    }
  }

  [[noreturn]] static void fail(j_common_ptr common) {
    auto* self = static_cast<Decompressor*>(common->client_data);
    format(*common->err, self->message);
    longjmp(self->on_error, 1);
  }
};

enum class Outcome { Done, Unsupported, Failed };

// Whether a region is known to equal the same part of the whole image. For CMYK and other sampling
// factors (4:1:0) it is not.
bool has_parts(const jpeg_decompress_struct& info) {
  const jpeg_component_info* c = info.comp_info;
  const auto is_one = [](const jpeg_component_info& component) {
    return component.h_samp_factor == 1 && component.v_samp_factor == 1;
  };
  return info.num_components == 1 || (info.num_components == 3 && c[0].h_samp_factor <= 2 &&
                                      c[0].v_samp_factor <= 2 && is_one(c[1]) && is_one(c[2]));
}

// The factor of decode_jpeg() in eighths. turbojpeg takes the largest that gives an image of the
// same size, which for images of a few pixels may exceed 1 / denominator.
unsigned scale_eighths(const jpeg_decompress_struct& info, int denominator) {
  const auto scaled = [&](unsigned eighths) {
    return std::pair((info.image_width * eighths + 7) / 8, (info.image_height * eighths + 7) / 8);
  };
  const unsigned exact = 8 / static_cast<unsigned>(denominator);
  unsigned eighths = exact;
  while (scaled(eighths + 1) == scaled(exact)) {
    ++eighths;
  }
  return eighths;
}

// Errors longjmp out of this function, so no local may have a destructor.
Outcome decode(Decompressor& decoder, const std::vector<uint8_t>& bytes, int denominator,
               const CropBox& region, std::vector<uint8_t>& row_bytes, uint8_t* out) {
  jpeg_decompress_struct& info = decoder.info;
  if (setjmp(decoder.on_error) != 0) {
    return Outcome::Failed;
  }
  jpeg_create_decompress(&info);  // fails where the header is of another version than the library
  jpeg_mem_src(&info, bytes.data(), bytes.size());
  (void)jpeg_read_header(&info, TRUE);
  if (!has_parts(info)) {
    return Outcome::Unsupported;
  }
  info.out_color_space = JCS_RGB;
  info.scale_num = scale_eighths(info, denominator);
  info.scale_denom = 8;
  (void)jpeg_start_decompress(&info);
  const auto limit = static_cast<int>(info.output_width);
  JDIMENSION x = static_cast<JDIMENSION>(std::max(region.x - kMargin, 0));
  JDIMENSION width =
      static_cast<JDIMENSION>(std::min(region.x + region.width + kMargin, limit)) - x;
  jpeg_crop_scanline(&info, &x, &width);
  const size_t needed = static_cast<size_t>(info.output_width) * 3;
  if (row_bytes.size() < needed) {
    row_bytes.resize(needed);
  }
  if (region.y > 0) {
    (void)jpeg_skip_scanlines(&info, static_cast<JDIMENSION>(region.y));
  }
  const size_t skip = (static_cast<size_t>(region.x) - x) * 3;
  const size_t length = static_cast<size_t>(region.width) * 3;
  JSAMPROW row = row_bytes.data();
  for (int y = 0; y < region.height; ++y) {
    (void)jpeg_read_scanlines(&info, &row, 1);
    std::memcpy(out + static_cast<size_t>(y) * length, row + skip, length);
  }
  return Outcome::Done;
}

// Whether the file ends with the end marker and optional padding. A truncated file has no marker,
// and its rows above the cut decode without error.
bool has_end(const std::vector<uint8_t>& bytes) {
  constexpr size_t kPadding = 1024;
  const size_t first = bytes.size() - std::min(bytes.size(), kPadding);
  for (size_t i = bytes.size(); i >= first + 2; --i) {
    if (bytes[i - 2] == 0xff && bytes[i - 1] == 0xd9) {
      return true;
    }
  }
  return false;
}

}  // namespace
#endif

void decode_jpeg_region(const std::vector<uint8_t>& bytes, const DataSource& source,
                        int denominator, const CropBox& region, uint8_t* out) {
#ifdef DDP_HAS_LIBJPEG
  thread_local std::vector<uint8_t> row_bytes;
  Decompressor decoder;
  const Outcome outcome = has_end(bytes)
                              ? decode(decoder, bytes, denominator, region, row_bytes, out)
                              : Outcome::Unsupported;
  if (outcome == Outcome::Failed) {
    fail_image("JPEG", source, bytes.size(), decoder.message);
  }
  if (outcome == Outcome::Done) {
    return;
  }
#endif
  thread_local RgbImage image;
  decode_jpeg(bytes, source, denominator, image);
  copy_region({image.pixels.data(), image.width, image.height}, region, out);
}

bool decodes_regions() {
#ifdef DDP_HAS_LIBJPEG
  return true;
#else
  return false;
#endif
}

}  // namespace ddp::detail
