// SPDX-License-Identifier: Apache-2.0
// PNG files under any names.
#include <sys/resource.h>
#include <torch/torch.h>
#include <zlib.h>

#include <cstdint>
#include <string>
#include <utility>

#include "core/settings/settings.hpp"
#include "ddp/core/error.hpp"
#include "ddp/data/dataset.hpp"
#include "ddp/train/config.hpp"
#include "support/catch.hpp"
#include "support/stderr_of.hpp"
#include "unit/data/data_test_support.hpp"
#include "unit/data/images/jpeg_writer.hpp"
#include "unit/data/sources/tar_writer.hpp"

using data_test::contains;
using data_test::message_of;
using data_test::read_file;
using data_test::TempFolder;

namespace {

// 170 x 130 pixels with transparency.
std::string golden_png() {
  return read_file(DDP_SOURCE_DIR "/tests/golden/eval/png.JPEG");
}

std::string deflated(const std::string& bytes) {
  uLongf size = compressBound(bytes.size());
  std::string out(size, '\0');
  REQUIRE(compress(reinterpret_cast<Bytef*>(out.data()), &size,
                   reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()) == Z_OK);
  out.resize(size);
  return out;
}

std::string big_endian(uint64_t value) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) {
    bytes += static_cast<char>(value >> shift);
  }
  return bytes;
}

// `body` begins with the chunk's name.
std::string png_chunk(const std::string& body) {
  const auto crc =
      crc32(0, reinterpret_cast<const Bytef*>(body.data()), static_cast<uInt>(body.size()));
  return big_endian(body.size() - 4) + body + big_endian(crc);
}

// The largest memory of this process so far.
int64_t peak_kilobytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

// Returns the error of a data set with one image.
std::string error_of_png(const std::string& bytes, int64_t max_pixels = 1'000'000) {
  TempFolder folder;
  data_test::write_file(folder.path() / "train.tar", data_test::tar_entry("0.jpg", bytes) +
                                                         data_test::tar_entry("0.cls", "0") +
                                                         data_test::tar_end());
  return message_of<ddp::DataError>([&] {
    (void)ddp::make_dataset({.path = folder.path(),
                             .image_size = 96,
                             .augment = ddp::Augment::RandomResizedCrop,
                             .cache = ddp::CachePolicy::Off,
                             .max_pixels = max_pixels})
        ->get(0);
  });
}

// The keys of the trainer's section.
struct ModelKeys {
  std::string name = "", dtype = "";
  bool zero_init_residual = false, channels_last = false;
};
void describe_fields(ModelKeys& keys, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "name", .doc = "The architecture."}, keys.name);
  visitor.field({.name = "dtype", .doc = "Of the parameters."}, keys.dtype);
  visitor.field({.name = "zero_init_residual", .doc = "As torchvision's."},
                keys.zero_init_residual);
  visitor.field({.name = "channels_last", .doc = "Memory order."}, keys.channels_last);
}

}  // namespace

TEST_CASE("the ImageNet configuration reads PNG files named .JPEG and skips damaged ones",
          "[png]") {
  ddp::Settings settings;
  settings.add_yaml_file(DDP_SOURCE_DIR "/examples/configs/resnet50_imagefolder.yaml");
  ddp::DataOptions options =
      ddp::Config::from_settings(std::move(settings),
                                 {ddp::uses({"train"}), ddp::declare_section<ModelKeys>("model")})
          .data;
  TempFolder folder;
  options.path = folder.path();
  const auto write = [&](const std::string& name, const std::string& bytes) {
    data_test::write_file(folder.path() / "train" / "n02105855" / name, bytes);
  };
  write("n02105855_1.JPEG", data_test::make_jpeg(300, 280));
  write("n02105855_2933.JPEG", golden_png());
  write("n02105855_3.JPEG", read_file(DDP_SOURCE_DIR "/tests/golden/eval/inks.jpg"));  // CMYK
  const std::string jpeg = data_test::make_jpeg(290, 270);
  write("n02105855_4.JPEG", jpeg.substr(0, jpeg.size() / 2));
  write("n02105855_5.JPEG", "no image");
  write("n02105855_6.PNG", golden_png().substr(0, 5000));
  // Many of 1.28 million images may be damaged, but none of six.
  REQUIRE(options.corrupt == ddp::CorruptPolicy::Skip);
  options.max_corrupt_fraction = 0.5;
  const auto dataset = ddp::make_dataset(options);
  REQUIRE(dataset->size() == 6);
  const std::string told = testing::stderr_of([&] {
    for (int64_t epoch = 0; epoch < 2; ++epoch) {
      for (int64_t i = 0; i < 6; ++i) {
        REQUIRE(dataset->get_for_epoch(i, epoch).data.isfinite().all().item<bool>());
      }
    }
  });
  REQUIRE(dataset->num_skipped() == 3);
  REQUIRE(testing::num_found(told, "skipped a corrupt image") == 3);
  REQUIRE(contains(told, "n02105855_6.PNG"));
}

TEST_CASE("a damaged PNG is named with its place", "[png]") {
  const std::string good = golden_png();
  REQUIRE(error_of_png(good).empty());
  const std::string at = "train.tar at offset 512: ";
  REQUIRE(contains(error_of_png(good, 170 * 130 - 1),
                   at + "PNG of 170 x 130 pixels; data.max_pixels allows 22099"));
  for (const size_t length :
       {size_t{4}, size_t{20}, size_t{60}, good.size() / 2, good.size() - 4}) {
    CAPTURE(length);
    const std::string message = error_of_png(good.substr(0, length));
    REQUIRE(contains(message, at + "corrupt or truncated PNG of " + std::to_string(length)));
    REQUIRE(contains(message, "data.corrupt=skip"));
  }
  // A flipped bit gives a picture or a DataError.
  for (size_t byte = 0; byte < good.size(); byte += 31) {
    std::string damaged = good;
    damaged[byte] = static_cast<char>(damaged[byte] ^ (1 << (byte % 8)));
    (void)error_of_png(damaged);
  }
  std::string large = good;
  large.replace(16, 8, std::string("\x7f\xff\xff\xff\x7f\xff\xff\xff", 8));
  REQUIRE(contains(error_of_png(large), "PNG of 2147483647 x 2147483647 pixels"));
  large.replace(16, 4, std::string(4, '\0'));
  REQUIRE(contains(error_of_png(large), "its size is invalid"));
}

TEST_CASE("a wrong checksum of any chunk is damage", "[png]") {
  using namespace std::string_literals;
  const size_t after_header = 33;
  for (const std::string& body :
       {"gAMA\0\0\xb1\x8f"s, "pHYs\0\0\xb\x13\0\0\xb\x13\1"s, "tEXtTitle\0x"s, "juNkany"s}) {
    for (const bool at_end : {false, true}) {
      if (at_end && body.starts_with("gAMA")) {
        continue;  // belongs before the pixels
      }
      std::string png = golden_png();
      std::string chunk = png_chunk(body);
      const size_t at = at_end ? png.size() - 12 : after_header;  // before IEND
      REQUIRE(error_of_png(std::string(png).insert(at, chunk)).empty());
      chunk.back() = static_cast<char>(chunk.back() ^ 1);
      png.insert(at, chunk);
      CHECK(contains(error_of_png(png), "corrupt or truncated PNG of " +
                                            std::to_string(png.size()) +
                                            " bytes: " + body.substr(0, 4) + ": CRC error"));
    }
  }
}

TEST_CASE("a PNG's compressed texts do not fill the memory", "[png]") {
  // 400 texts of 7 MiB each, which deflate to 7 KiB.
  constexpr size_t kTextBytes = size_t{7} << 20, kTexts = 400;
  const std::string text = deflated(std::string(kTextBytes, 'a'));
  std::string png = golden_png();
  const size_t after_header = 33;
  for (size_t i = 0; i < kTexts; ++i) {
    png.insert(after_header, png_chunk("zTXt" + std::string("k\0\0", 3) + text));
  }
  const int64_t before = peak_kilobytes();
  REQUIRE(error_of_png(png).empty());
  CHECK(peak_kilobytes() - before < int64_t{300} << 10);
}

TEST_CASE("a tar shard may hold PNG files by name", "[png]") {
  TempFolder folder;
  data_test::write_file(folder.path() / "train.tar", data_test::tar_entry("0.png", golden_png()) +
                                                         data_test::tar_entry("0.cls", "3") +
                                                         data_test::tar_end());
  const auto dataset = ddp::make_dataset({.path = folder.path()});
  REQUIRE(dataset->size() == 1);
  REQUIRE(dataset->get(0).target.item<int64_t>() == 3);
}
