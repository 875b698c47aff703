// SPDX-License-Identifier: Apache-2.0
// Parts of JPEG images: the same bytes as decoding the whole image, and errors for damaged files.
#include <algorithm>
#include <cstring>

#include "data/images/image_transform.hpp"
#include "data/images/jpeg.hpp"
#include "data/sources/image_dataset.hpp"
#include "ddp/data/data_loader.hpp"
#include "ddp/data/sample_rng.hpp"
#include "support/catch.hpp"
#include "unit/data/data_test_support.hpp"
#include "unit/data/images/jpeg_writer.hpp"
#include "unit/data/sources/tar_writer.hpp"

using data_test::contains;
using data_test::make_jpeg;
using data_test::message_of;
using ddp::CropBox;
using ddp::detail::RgbImage;

namespace {

std::vector<uint8_t> as_bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

std::vector<uint8_t> cut(const RgbImage& image, const CropBox& box) {
  std::vector<uint8_t> out;
  for (int y = box.y; y < box.y + box.height; ++y) {
    const uint8_t* row = image.pixels.data() + (y * image.width + box.x) * 3;
    out.insert(out.end(), row, row + box.width * 3);
  }
  return out;
}

// The image without its segments of one kind.
std::vector<uint8_t> without_segments(const std::vector<uint8_t>& bytes, uint8_t marker) {
  std::vector<uint8_t> out(bytes.begin(), bytes.begin() + 2);
  size_t at = 2;
  while (bytes[at + 1] != 0xda) {  // the scan follows all tables
    const auto next = at + 2 + bytes[at + 2] * size_t{256} + bytes[at + 3];
    if (bytes[at + 1] != marker) {
      out.insert(out.end(), bytes.begin() + static_cast<ptrdiff_t>(at),
                 bytes.begin() + static_cast<ptrdiff_t>(next));
    }
    at = next;
  }
  out.insert(out.end(), bytes.begin() + static_cast<ptrdiff_t>(at), bytes.end());
  return out;
}

}  // namespace

TEST_CASE("a decoded region has the bytes of the whole decoded image", "[jpeg]") {
  const int subsampling = GENERATE(TJSAMP_444, TJSAMP_422, TJSAMP_420, TJSAMP_GRAY, TJSAMP_440);
  const int denominator = GENERATE(1, 2, 4, 8);
  const std::string path = "memory";
  ddp::SampleRng rng(7, static_cast<uint64_t>(subsampling), static_cast<uint64_t>(denominator));
  for (const auto& [width, height] :
       {std::pair{333, 251}, std::pair{256, 512}, std::pair{97, 40}}) {
    const auto bytes = as_bytes(make_jpeg(width, height, subsampling, rng.next()));
    (void)ddp::detail::read_jpeg_header(bytes, {path}, 1'000'000);
    RgbImage whole;
    ddp::detail::decode_jpeg(bytes, {path}, denominator, whole);
    for (int i = 0; i < 40; ++i) {
      CropBox box;
      box.width = 1 + static_cast<int>(rng.below(static_cast<uint32_t>(whole.width)));
      box.height = 1 + static_cast<int>(rng.below(static_cast<uint32_t>(whole.height)));
      box.x = static_cast<int>(rng.below(static_cast<uint32_t>(whole.width - box.width + 1)));
      box.y = static_cast<int>(rng.below(static_cast<uint32_t>(whole.height - box.height + 1)));
      std::vector<uint8_t> part(static_cast<size_t>(box.width * box.height * 3) + 1, 7);
      ddp::detail::decode_jpeg_region(bytes, {path}, denominator, box, part.data());
      CAPTURE(subsampling, denominator, width, height, box.x, box.y, box.width, box.height);
      REQUIRE(part.back() == 7);  // the byte after it is unchanged
      part.pop_back();
      REQUIRE(part == cut(whole, box));
    }
  }
}

TEST_CASE("a region of a tiny image has the bytes of the whole decoded image", "[jpeg]") {
  // At 1/4 and at 1/8, for one, an image of 4 x 2 has one pixel, but not the same one.
  const int subsampling = GENERATE(TJSAMP_444, TJSAMP_422, TJSAMP_420, TJSAMP_GRAY, TJSAMP_440);
  const int denominator = GENERATE(1, 2, 4, 8);
  const std::string path = "memory";
  for (int width = 1; width <= 12; ++width) {
    for (int height = 1; height <= 12; ++height) {
      const auto seed = static_cast<uint64_t>(width * 100 + height);
      const auto bytes = as_bytes(make_jpeg(width, height, subsampling, seed));
      RgbImage whole;
      ddp::detail::decode_jpeg(bytes, {path}, denominator, whole);
      const CropBox all{.x = 0, .y = 0, .width = whole.width, .height = whole.height};
      const CropBox last{.x = whole.width - 1, .y = whole.height - 1, .width = 1, .height = 1};
      for (const CropBox& box : {all, last}) {
        std::vector<uint8_t> part(static_cast<size_t>(box.width * box.height * 3));
        ddp::detail::decode_jpeg_region(bytes, {path}, denominator, box, part.data());
        CAPTURE(subsampling, denominator, width, height, box.x, box.y);
        REQUIRE(part == cut(whole, box));
      }
    }
  }
}

TEST_CASE("a truncated file is corrupt whichever region is requested", "[jpeg]") {
  const std::string path = "shard.tar";
  const std::string whole = make_jpeg(320, 240);
  std::vector<uint8_t> part(16 * 16 * 3);
  const CropBox top{0, 0, 16, 16};
  const std::string good = message_of<ddp::DataError>([&] {
    ddp::detail::decode_jpeg_region(as_bytes(whole), {path, 9}, 1, top, part.data());
  });
  REQUIRE(good.empty());
  // Padding after the end is not damage.
  ddp::detail::decode_jpeg_region(as_bytes(whole + std::string(100, '\0')), {path, 9}, 1, top,
                                  part.data());
  for (const double share : {0.99, 0.7, 0.3}) {
    const auto bytes = as_bytes(whole.substr(0, static_cast<size_t>(double(whole.size()) * share)));
    const std::string message = message_of<ddp::detail::CorruptImage>([&] {
      ddp::detail::decode_jpeg_region(bytes, {path, 9}, 1, top, part.data());
    });
    REQUIRE(contains(message, "shard.tar at offset 9"));
    REQUIRE(contains(message, "corrupt or truncated JPEG"));
  }
  // Damage inside the part is detected, and the decoder still works for the next image.
  std::string damaged = whole;
  for (size_t i = whole.size() / 3; i < whole.size() / 3 + 40; ++i) {
    damaged[i] = '\xff';
  }
  std::vector<uint8_t> all(320 * 240 * 3);
  const std::string message = message_of<ddp::detail::CorruptImage>([&] {
    ddp::detail::decode_jpeg_region(as_bytes(damaged), {path, 9}, 1, {0, 0, 320, 240}, all.data());
  });
  REQUIRE(contains(message, "shard.tar at offset 9"));
  ddp::detail::decode_jpeg_region(as_bytes(whole), {path, 9}, 1, {0, 0, 320, 240}, all.data());
  RgbImage image;
  ddp::detail::decode_jpeg(as_bytes(whole), {path}, 1, image);
  REQUIRE(all == image.pixels);
}

TEST_CASE("a sample made from a region equals the one made from the whole image", "[jpeg]") {
  const auto augment = GENERATE(ddp::Augment::RandomResizedCrop, ddp::Augment::None);
  const int size = GENERATE(32, 50);
  ddp::DataOptions options;
  options.format = ddp::DataFormat::Tar;
  options.image_size = size;
  options.eval_resize = size * 8 / 7;
  options.augment = augment;
  options.cutout = 9;
  options.mean = {0.4, 0.5, 0.6};
  options.std = {0.2, 0.3, 0.25};
  const ddp::detail::ImageTransform transform(options, true);
  for (uint64_t i = 0; i < 60; ++i) {
    const int width = 60 + static_cast<int>(i) * 9, height = 45 + static_cast<int>(i * i % 300);
    const auto bytes = as_bytes(make_jpeg(width, height, TJSAMP_420, i));
    const std::string path = "memory";
    const auto plan = transform.plan(width, height, 2, i);
    const CropBox& region = plan.region;
    RgbImage whole;
    ddp::detail::decode_jpeg(bytes, {path}, plan.denominator, whole);
    REQUIRE(whole.width == plan.whole_width);
    REQUIRE(whole.height == plan.whole_height);
    std::vector<float> expected(static_cast<size_t>(size * size * 3)), made(expected.size());
    transform.apply({whole.pixels.data(), whole.width, whole.height}, plan, expected.data());
    const auto part = cut(whole, region);
    transform.apply({part.data(), region.width, region.height, region.x, region.y}, plan,
                    made.data());
    REQUIRE(made == expected);
  }
}

TEST_CASE("images of one pixel, one row or one column load", "[jpeg]") {
  data_test::TempFolder folder;
  std::string tar;
  int count = 0;
  for (const auto& [width, height] : {std::pair{1, 1}, std::pair{1, 37}, std::pair{1, 400},
                                      std::pair{41, 1}, std::pair{400, 1}, std::pair{2, 3}}) {
    const std::string key = std::to_string(count++);
    tar += data_test::tar_entry(key + ".jpg", make_jpeg(width, height));
    tar += data_test::tar_entry(key + ".cls", key);
  }
  data_test::write_file(folder.path() / "train.tar", tar + data_test::tar_end());
  // Bounds on both sides of 1: no draw fits, and the centre box rounds to less than a pixel.
  for (const auto& [low, high] :
       {std::pair{0.75, 4.0 / 3}, std::pair{3.0, 4.0}, std::pair{0.2, 0.3}}) {
    ddp::DataOptions options{.path = folder.path(), .image_size = 24};
    options.augment = ddp::Augment::RandomResizedCrop;
    options.cache = ddp::CachePolicy::Off;
    options.random_resized_crop.min_ratio = low;
    options.random_resized_crop.max_ratio = high;
    const auto dataset = ddp::make_dataset(options);
    for (int64_t epoch = 0; epoch < 8; ++epoch) {
      for (int64_t i = 0; i < count; ++i) {
        CAPTURE(low, high, epoch, i);
        const auto image = dataset->get_for_epoch(i, epoch);
        REQUIRE(image.target.item<int64_t>() == i);
        REQUIRE(image.data.isfinite().all().item<bool>());
        REQUIRE(image.data.abs().max().item<float>() < 4);  // normalised bytes
      }
    }
  }
}

TEST_CASE("photographs of a tar shard load, and a decoded region equals get()", "[jpeg]") {
  data_test::TempFolder folder;
  std::string tar;
  for (int i = 0; i < 6; ++i) {
    const std::string key = std::to_string(i);
    tar += data_test::tar_entry(
        key + ".jpg", make_jpeg(200 + 40 * i, 300 - 30 * i, TJSAMP_420, static_cast<uint64_t>(i)));
    tar += data_test::tar_entry(key + ".cls", key);
  }
  data_test::write_file(folder.path() / "train.tar", tar + data_test::tar_end());
  const auto dataset = ddp::make_dataset({.path = folder.path(), .image_size = 80});
  REQUIRE(ddp::detail::as_images(*dataset)->decoded() == nullptr);
  ddp::DataLoader loader(dataset, ddp::DistributedSampler(6, 0, 1, {.shuffle = false}), at::kCPU,
                         {.batch_size = 6});
  const auto batch = loader.next();
  for (int64_t i = 0; i < 6; ++i) {
    REQUIRE(batch.target[i].item<int64_t>() == i);
    REQUIRE(at::equal(batch.data[i], dataset->get(i).data));
  }
  const std::string message = message_of<ddp::SettingsError>([&] {
    ddp::DataLoader refused(dataset, ddp::DistributedSampler(6, 0, 1), at::kCPU,
                            {.device_transform = ddp::DevicePolicy::On});
  });
  REQUIRE(contains(message, "loader.device_transform=on"));
}

TEST_CASE("an image without tables is not decoded with another image's", "[jpeg]") {
  constexpr uint8_t kQuantization = 0xdb;
  const std::string path = "memory";
  const auto whole = as_bytes(make_jpeg(64, 48));
  const auto damaged = without_segments(whole, kQuantization);
  REQUIRE(damaged.size() < whole.size());
  RgbImage image;
  std::vector<uint8_t> part(size_t{16} * 16 * 3);
  const CropBox box{.x = 8, .y = 8, .width = 16, .height = 16};

  ddp::detail::decode_jpeg(whole, {path}, 1, image);
  CHECK_THROWS_AS(ddp::detail::decode_jpeg(damaged, {path}, 1, image), ddp::detail::CorruptImage);
  ddp::detail::decode_jpeg_region(whole, {path}, 1, box, part.data());
  CHECK_THROWS_AS(ddp::detail::decode_jpeg_region(damaged, {path}, 1, box, part.data()),
                  ddp::detail::CorruptImage);
}
