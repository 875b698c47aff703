// SPDX-License-Identifier: Apache-2.0
// JPEG files found in practice: four inks, sampling factors without a name.
#include <cstdio>
// jpeglib.h needs <cstdio> before it.
#include <jpeglib.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <vector>

#include "data/images/jpeg.hpp"
#include "support/catch.hpp"
#include "unit/data/data_test_support.hpp"

using data_test::contains;
using data_test::message_of;
using ddp::detail::RgbImage;

namespace {

constexpr int kWidth = 90, kHeight = 70;
const std::string kPath = "memory";

struct Factors {
  int h = 1, v = 1;
};

/// Value of a channel at a pixel: smooth and different per channel.
int value(int x, int y, int channel) {
  const std::array<int, 4> all = {40 + 2 * x, 230 - 2 * y, 60 + x + y, 120 + x};
  return all[static_cast<size_t>(channel)];
}

/// Writes the channels unconverted: RGB stored as YCbCr; four inks stored as CMYK or as YCCK.
std::vector<uint8_t> write_jpeg(J_COLOR_SPACE stored, const std::vector<Factors>& factors) {
  jpeg_compress_struct info{};
  jpeg_error_mgr errors{};
  // Not every program can link the library's own error handler.
  errors.error_exit = [](j_common_ptr) { std::abort(); };
  errors.emit_message = [](j_common_ptr, int) {};
  errors.output_message = [](j_common_ptr) {};
  errors.format_message = [](j_common_ptr, char*) {};
  errors.reset_error_mgr = [](j_common_ptr) {};
  info.err = &errors;
  jpeg_create_compress(&info);
  unsigned char* out = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&info, &out, &size);
  const bool inks = stored == JCS_CMYK || stored == JCS_YCCK;
  info.image_width = kWidth;
  info.image_height = kHeight;
  info.input_components = inks ? 4 : 3;
  info.in_color_space = inks ? JCS_CMYK : JCS_RGB;
  jpeg_set_defaults(&info);
  jpeg_set_colorspace(&info, stored);
  jpeg_set_quality(&info, 97, TRUE);
  for (size_t i = 0; i < factors.size(); ++i) {
    info.comp_info[i].h_samp_factor = factors[i].h;
    info.comp_info[i].v_samp_factor = factors[i].v;
  }
  jpeg_start_compress(&info, TRUE);
  std::vector<uint8_t> row(static_cast<size_t>(kWidth * info.input_components));
  for (int y = 0; y < kHeight; ++y) {
    for (int x = 0; x < kWidth; ++x) {
      for (int c = 0; c < info.input_components; ++c) {
        row[static_cast<size_t>(x * info.input_components + c)] =
            static_cast<uint8_t>(value(x, y, c));
      }
    }
    JSAMPROW line = row.data();
    (void)jpeg_write_scanlines(&info, &line, 1);
  }
  jpeg_finish_compress(&info);
  jpeg_destroy_compress(&info);
  std::vector<uint8_t> bytes(out, out + size);
  std::free(out);
  return bytes;
}

RgbImage decode(const std::vector<uint8_t>& bytes, int denominator = 1) {
  const auto header = ddp::detail::read_jpeg_header(bytes, {kPath}, 1'000'000);
  REQUIRE(header.width == kWidth);
  REQUIRE(header.height == kHeight);
  RgbImage image;
  ddp::detail::decode_jpeg(bytes, {kPath}, denominator, image);
  return image;
}

/// The largest difference from the pixels that `expected` returns.
template <typename F>
int largest_error(const RgbImage& image, F&& expected) {
  int largest = 0;
  for (int y = 0; y < image.height; ++y) {
    for (int x = 0; x < image.width; ++x) {
      for (int c = 0; c < 3; ++c) {
        const int made = image.pixels[static_cast<size_t>((y * image.width + x) * 3 + c)];
        largest = std::max(largest, std::abs(made - expected(x, y, c)));
      }
    }
  }
  return largest;
}

void require_parts_as_whole(const std::vector<uint8_t>& bytes) {
  for (const int denominator : {1, 2}) {
    const auto whole = decode(bytes, denominator);
    const ddp::CropBox box{7, 9, 21, 13};
    std::vector<uint8_t> part(static_cast<size_t>(box.width * box.height * 3));
    ddp::detail::decode_jpeg_region(bytes, {kPath}, denominator, box, part.data());
    for (int y = 0; y < box.height; ++y) {
      const auto* from = whole.pixels.data() + ((box.y + y) * whole.width + box.x) * 3;
      REQUIRE(std::equal(from, from + box.width * 3, part.data() + y * box.width * 3));
    }
  }
}

}  // namespace

TEST_CASE("CMYK images have the right colours", "[jpeg]") {
  // Inverted, like Adobe's: 255 in a channel means no ink.
  const auto stored = GENERATE(JCS_CMYK, JCS_YCCK);
  const auto bytes = write_jpeg(stored, {{1, 1}, {1, 1}, {1, 1}, {1, 1}});
  CAPTURE(stored);
  const auto colour = [](int x, int y, int c) { return value(x, y, c) * value(x, y, 3) / 255; };
  REQUIRE(largest_error(decode(bytes), colour) <= 6);
  require_parts_as_whole(bytes);
}

TEST_CASE("images with unnamed sampling factors are not corrupt", "[jpeg]") {
  struct Kind {
    J_COLOR_SPACE stored;
    std::vector<Factors> factors;
  };
  const auto kind = GENERATE(Kind{JCS_YCbCr, {{4, 2}, {1, 1}, {1, 1}}},  // 4:1:0
                             Kind{JCS_YCbCr, {{2, 2}, {1, 1}, {1, 2}}},  // chroma of two sizes
                             Kind{JCS_YCbCr, {{1, 1}, {2, 1}, {1, 1}}},  // more chroma than luma
                             Kind{JCS_CMYK, {{2, 1}, {1, 1}, {1, 1}, {2, 1}}});
  const auto bytes = write_jpeg(kind.stored, kind.factors);
  const bool inks = kind.stored == JCS_CMYK;
  const auto colour = [&](int x, int y, int c) {
    return inks ? value(x, y, c) * value(x, y, 3) / 255 : value(x, y, c);
  };
  CAPTURE(kind.stored, kind.factors[0].h, kind.factors[0].v);
  REQUIRE(largest_error(decode(bytes), colour) <= 16);  // 4 x 2 pixels share a colour at borders
  require_parts_as_whole(bytes);

  // Truncated files are damaged.
  const std::vector<uint8_t> cut(bytes.begin(), bytes.begin() + 400);
  RgbImage image;
  REQUIRE(contains(message_of<ddp::detail::CorruptImage>(
                       [&] { ddp::detail::decode_jpeg(cut, {kPath}, 1, image); }),
                   "corrupt or truncated JPEG"));
}
