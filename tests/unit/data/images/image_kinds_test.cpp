// SPDX-License-Identifier: Apache-2.0
// Image files of all kinds against Pillow (tests/golden/make_image_kinds_golden.py), WebP files
// that must be refused, and grey images.
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "data/images/image_file.hpp"
#include "data/sources/image_dataset.hpp"
#include "ddp/core/error.hpp"
#include "ddp/data/data_loader.hpp"
#include "support/catch.hpp"
#include "unit/data/data_test_support.hpp"
#include "unit/data/images/jpeg_writer.hpp"
#include "unit/data/sources/cifar10_sample.hpp"
#include "unit/data/sources/tar_writer.hpp"

using data_test::contains;
using data_test::message_of;
using data_test::TempFolder;

namespace {

#ifdef DDP_HAS_WEBP
constexpr bool kHasWebp = true;
#else
constexpr bool kHasWebp = false;
#endif

struct Kind {
  std::string name;
  int width = 0, height = 0;
  std::vector<uint8_t> file, rgb, grey;
  bool is_webp() const { return name.starts_with("webp"); }
  std::string text() const { return {file.begin(), file.end()}; }
};

std::vector<uint8_t> bytes_of(const std::string& hex) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(static_cast<uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

std::vector<Kind> kinds() {
  std::ifstream golden(DDP_SOURCE_DIR "/tests/golden/image_kinds_golden.csv");
  std::vector<Kind> all;
  for (std::string line; std::getline(golden, line);) {
    std::replace(line.begin(), line.end(), ',', ' ');
    std::istringstream in(line);
    Kind kind;
    std::string file, rgb, grey;
    in >> kind.name >> kind.width >> kind.height >> file >> rgb >> grey;
    kind.file = bytes_of(file);
    kind.rgb = bytes_of(rgb);
    kind.grey = bytes_of(grey);
    all.push_back(kind);
  }
  return all;
}

Kind kind_called(const std::string& name) {
  for (const Kind& kind : kinds()) {
    if (kind.name == name) {
      return kind;
    }
  }
  FAIL("no golden image " << name);
  return {};
}

// The message of a data set with one image. `max_pixels` of data.max_pixels.
std::string error_of_image(const std::string& bytes, int64_t max_pixels = 1'000'000) {
  TempFolder folder;
  data_test::write_file(folder.path() / "train" / "class" / "0.png", bytes);
  const auto read = [&] {
    (void)ddp::make_dataset({.path = folder.path(), .image_size = 96, .max_pixels = max_pixels})
        ->get(0);
  };
  return message_of<ddp::Error>(read);
}

}  // namespace

TEST_CASE("image files of all kinds have Pillow's RGB and grey pixels", "[image_kinds]") {
  const auto all = kinds();
  REQUIRE(all.size() == 29);
  const std::string path = "golden";
  for (const Kind& kind : all) {
    if (kind.is_webp() && !kHasWebp) {
      continue;
    }
    CAPTURE(kind.name);
    const auto header = ddp::detail::read_image_header(kind.file, {path}, 1000);
    REQUIRE(header.width == kind.width);
    REQUIRE(header.height == kind.height);
    std::vector<uint8_t> pixels(kind.rgb.size());
    ddp::detail::decode_image_region(kind.file, {path}, 1, {0, 0, kind.width, kind.height},
                                     pixels.data());
    CHECK(pixels == kind.rgb);
    // Three columns and two rows from (4, 5) on.
    std::vector<uint8_t> part(3 * 2 * 3), expected;
    ddp::detail::decode_image_region(kind.file, {path}, 1, {4, 5, 3, 2}, part.data());
    for (int y = 5; y < 7; ++y) {
      const auto from = kind.rgb.begin() + (y * kind.width + 4) * 3;
      expected.insert(expected.end(), from, from + 9);
    }
    CHECK(part == expected);
    ddp::detail::make_grey(pixels.data(), kind.grey.size());
    for (size_t i = 0; i < kind.grey.size(); ++i) {
      const uint8_t* p = pixels.data() + 3 * i;
      REQUIRE((p[0] == kind.grey[i] && p[1] == kind.grey[i] && p[2] == kind.grey[i]));
    }
  }
}

TEST_CASE("damaged, large and animated WebP files are named", "[image_kinds]") {
  const std::string good = kind_called("webp_lossy").text();
  const std::string at = "0.png at offset 0: ";
  if (!kHasWebp) {
    CHECK(contains(error_of_image(good),
                   "libddp was built without libwebp; fix: install libwebp-dev"));
    return;
  }
  CHECK(error_of_image(good).empty());
  CHECK(contains(error_of_image(good, 37 * 21 - 1),
                 at + "WebP of 37 x 21 pixels; data.max_pixels allows 776"));
  for (const char* name : {"webp_lossy", "webp_lossless", "webp_lossless_alpha"}) {
    const std::string whole = kind_called(name).text();
    for (const size_t length : {size_t{12}, size_t{24}, whole.size() / 2, whole.size() - 8}) {
      CAPTURE(name, length);
      const std::string message = error_of_image(whole.substr(0, length));
      CHECK(contains(message, at + "corrupt or truncated WebP of " + std::to_string(length)));
      CHECK(contains(message, "data.corrupt=skip"));
    }
  }
  // A flipped bit gives a picture or an error.
  for (size_t byte = 0; byte < good.size(); ++byte) {
    std::string damaged = good;
    damaged[byte] = static_cast<char>(damaged[byte] ^ (1 << (byte % 8)));
    (void)error_of_image(damaged);
  }
  // An extended header of 16 x 16 pixels whose flags announce an animation, or none.
  std::string animated("RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\x02\0\0\0\x0f\0\0\x0f\0\0", 30);
  CHECK(contains(error_of_image(animated), at + "an animated WebP"));
  animated[20] = 0;
  CHECK(contains(error_of_image(animated),
                 at + "corrupt or truncated WebP of 30 bytes: libwebp cannot decode it"));
  CHECK(
      contains(error_of_image(std::string("RIFF\x04\0\0\0WAVEfmt ", 16)),
               "(starts with 52 49 46 46; a JPEG starts with ff d8, a PNG with 89 50 4e 47, a WebP "
               "with 52 49 46 46, four other bytes and 57 45 42 50)"));
}

TEST_CASE("folders and shards mix JPEG, PNG and WebP files", "[image_kinds]") {
  TempFolder folder;
  const Kind webp = kind_called("webp_lossy"), png = kind_called("png_grey8");
  const auto classes = folder.path() / "folders" / "train";
  data_test::write_file(classes / "a" / "0.PNG", png.text());
  data_test::write_file(classes / "a" / "1.jpeg", data_test::make_jpeg(40, 30));
  data_test::write_file(classes / "a" / "notes.txt", "not an image");
  std::string tar = data_test::tar_entry("0.png", png.text()) + data_test::tar_entry("0.cls", "0") +
                    data_test::tar_entry("1.jpg", data_test::make_jpeg(40, 30)) +
                    data_test::tar_entry("1.cls", "0");
  if (kHasWebp) {
    data_test::write_file(classes / "b" / "2.webp", webp.text());
    tar += data_test::tar_entry("2.webp", webp.text()) + data_test::tar_entry("2.cls", "1");
  }
  data_test::write_file(folder.path() / "shards" / "train.tar", tar + data_test::tar_end());
  for (const char* kind : {"folders", "shards"}) {
    for (const auto augment : {ddp::Augment::RandomResizedCrop, ddp::Augment::None}) {
      const auto dataset = ddp::make_dataset({.path = folder.path() / kind,
                                              .image_size = 8,
                                              .augment = augment,
                                              .cache = ddp::CachePolicy::Off});
      REQUIRE(dataset->size() == (kHasWebp ? 3 : 2));
      for (int64_t i = 0; i < dataset->size(); ++i) {
        CHECK(dataset->get(i).data.sizes() == at::IntArrayRef({3, 8, 8}));
        CHECK(dataset->get(i).target.item<int64_t>() == (i == 2 ? 1 : 0));
      }
      // A grey file has three equal planes.
      const auto grey = ddp::make_dataset({.path = folder.path() / kind,
                                           .image_size = 10,
                                           .augment = ddp::Augment::None,
                                           .mean = {0, 0, 0},
                                           .std = {1, 1, 1}})
                            ->get(0)
                            .data;
      CHECK(torch::equal(grey[0], grey[2]));
      CHECK((grey[0] * 255).round()[0][0].item<int>() == png.grey[2]);  // a centre crop of 15 x 10
    }
  }
}

TEST_CASE("a build without libwebp refuses files named .webp at once", "[image_kinds]") {
  TempFolder folder;
  const std::string webp = kind_called("webp_lossy").text();
  data_test::write_file(folder.path() / "folders/train/a/0.jpg", data_test::make_jpeg(40, 30));
  data_test::write_file(folder.path() / "folders/train/a/1.webp", webp);
  data_test::write_file(folder.path() / "shards/train.tar",
                        data_test::tar_entry("1.cls", "0") + data_test::tar_entry("1.webp", webp) +
                            data_test::tar_end());
  for (const char* kind : {"folders", "shards"}) {
    const std::string message = message_of<ddp::DataError>(
        [&] { (void)ddp::make_dataset({.path = folder.path() / kind, .image_size = 8}); });
    CHECK(message.empty() == kHasWebp);
    CHECK(contains(message, "1.webp: a WebP image, but libddp was built without libwebp") !=
          kHasWebp);
  }
}

TEST_CASE("images of kinds that are not read are named, not left out", "[image_kinds]") {
  const auto name = GENERATE(as<std::string>{}, "1.bmp", "1.TIFF", "1.tif", "1.ppm", "1.pgm");
  TempFolder folder;
  data_test::write_file(folder.path() / "folders/train/a/0.jpg", data_test::make_jpeg(40, 30));
  data_test::write_file(folder.path() / "folders/train/a" / name, "some image");
  data_test::write_file(folder.path() / "shards/train.tar", data_test::tar_entry(name, "image") +
                                                                data_test::tar_entry("1.cls", "0") +
                                                                data_test::tar_end());
  for (const char* kind : {"folders", "shards"}) {
    const std::string message = message_of<ddp::DataError>(
        [&] { (void)ddp::make_dataset({.path = folder.path() / kind, .image_size = 8}); });
    CHECK(contains(message, name + ": images of this kind are not read; fix: convert them to "
                                   ".jpg, .png or .webp"));
  }
}

TEST_CASE("data.channels=1 gives the luma of each pixel, before any resizing", "[image_kinds]") {
  TempFolder folder;
  const Kind rgb = kind_called("png_rgb8"), grey = kind_called("png_grey8");
  data_test::write_file(folder.path() / "train/a/0.png", rgb.text());
  data_test::write_file(folder.path() / "train/a/1.png", grey.text());
  const bool channels_last = GENERATE(false, true);
  const auto cache = GENERATE(ddp::CachePolicy::Ram, ddp::CachePolicy::Off);
  const ddp::DataOptions options{.path = folder.path(),
                                 .image_size = 10,
                                 .channels = 1,
                                 .augment = ddp::Augment::None,
                                 .mean = {0},
                                 .std = {1},
                                 .channels_last = channels_last,
                                 .cache = cache};
  const auto dataset = ddp::make_dataset(options);
  ddp::DataLoader loader(dataset, ddp::DistributedSampler(2, 0, 1, {.shuffle = false}), at::kCPU,
                         {.batch_size = 2});
  const auto batch = loader.next().data;
  REQUIRE(batch.sizes() == at::IntArrayRef({2, 1, 10, 10}));
  for (int64_t i = 0; i < 2; ++i) {
    const Kind& kind = i == 0 ? rgb : grey;
    REQUIRE(torch::equal(dataset->get(i).data, batch[i]));
    for (int y = 0; y < 10; ++y) {
      for (int x = 0; x < 10; ++x) {  // the centre crop begins at column 2
        const auto expected = kind.grey[static_cast<size_t>(y * 15 + x + 2)];
        REQUIRE(batch[i][0][y][x].item<float>() == static_cast<float>(expected) / 255.0f);
      }
    }
  }
}

TEST_CASE("one channel of a grey image equals each of three", "[image_kinds]") {
  TempFolder folder;
  data_test::write_file(folder.path() / "train/a/0.jpg", data_test::make_jpeg(90, 70, TJSAMP_GRAY));
  const auto augment = GENERATE(ddp::Augment::RandomResizedCrop, ddp::Augment::PadCrop);
  const bool channels_last = GENERATE(false, true);
  const int64_t ops = GENERATE(0, 3);
  ddp::DataOptions options{.path = folder.path(),
                           .image_size = 48,
                           .augment = augment,
                           .cutout = 9,
                           .rand_augment = {.ops = ops, .magnitude = 12},
                           .mean = {0.4, 0.4, 0.4},
                           .std = {0.3, 0.3, 0.3},
                           .channels_last = channels_last};
  const auto three = ddp::make_dataset(options);
  options.channels = 1;
  options.mean = {0.4};
  options.std = {0.3};
  const auto one = ddp::make_dataset(options);
  for (int64_t epoch = 0; epoch < 6; ++epoch) {
    const auto expected = three->get_for_epoch(0, epoch).data;
    CHECK(torch::equal(one->get_for_epoch(0, epoch).data, expected.narrow(0, 1, 1)));
  }
}

TEST_CASE("the default mean of grey images is the luma of the channels' means", "[image_kinds]") {
  const auto format =
      GENERATE(ddp::DataFormat::Cifar10, ddp::DataFormat::Cifar100, ddp::DataFormat::Synthetic);
  ddp::DataOptions options{.format = format, .path = "unused"};
  const auto rgb = ddp::detail::resolve_data_options(options);
  options.channels = 1;
  const auto grey = ddp::detail::resolve_data_options(options);
  const auto luma = [](const std::vector<double>& v) {
    return 0.299 * v[0] + 0.587 * v[1] + 0.114 * v[2];
  };
  CHECK(grey.mean.at(0) == Approx(luma(rgb.mean)).margin(6e-5));
  CHECK(grey.std.at(0) == Approx(luma(rgb.std)).epsilon(0.04));
  CHECK(grey.std.at(0) <= luma(rgb.std) + 5e-5);
}

TEST_CASE("data.channels and the means fit together", "[image_kinds]") {
  const auto error = [](ddp::DataOptions options) {
    options.format = ddp::DataFormat::Synthetic;
    options.image_size = 8;
    return message_of<ddp::SettingsError>([&] { (void)ddp::make_dataset(options); });
  };
  CHECK(contains(error({.channels = 2}), "data.channels=2 must be 3 (RGB), 1 (grey) or 0"));
  CHECK(contains(error({.channels = 1, .mean = {0, 0, 0}}),
                 "data.mean has 3 values; it needs 1 (grey)"));
  CHECK(contains(error({.std = {1}}), "data.std has 1 values; it needs 3 (red, green, blue)"));
  const auto synthetic = ddp::make_dataset(
      {.format = ddp::DataFormat::Synthetic, .image_size = 8, .channels = 1, .num_samples = 4});
  const auto coloured =
      ddp::make_dataset({.format = ddp::DataFormat::Synthetic, .image_size = 8, .num_samples = 4});
  CHECK(torch::equal(synthetic->get(3).data, coloured->get(3).data.narrow(0, 0, 1)));
}
