// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <cstdint>
#include <set>
#include <sstream>

#include "data/images/image_transform.hpp"
#include "data/images/jpeg.hpp"
#include "data/sources/tar_index.hpp"
#include "ddp/core/error.hpp"
#include "ddp/data/dataset.hpp"
#include "support/catch.hpp"
#include "support/named_pipe.hpp"
#include "support/stderr_of.hpp"
#include "unit/data/data_test_support.hpp"
#include "unit/data/sources/cifar10_sample.hpp"
#include "unit/data/sources/tar_writer.hpp"

namespace fs = std::filesystem;
using data_test::contains;
using data_test::kSample;
using data_test::message_of;
using data_test::TempFolder;
using ddp::DataOptions;
using ddp::make_dataset;
using ddp::Split;

namespace {

// The JPEG files of the sample's test shard.
std::string sample_jpeg(size_t number) {
  const ddp::detail::DataFile file(kSample + "/test-000.tar");
  const auto entry = ddp::detail::read_tar_index(file).at(number);
  std::string bytes(static_cast<size_t>(entry.size), '\0');
  file.read_at(entry.offset, bytes.data(), entry.size);
  return bytes;
}

std::string cifar_file(int first_label, int num_records) {
  std::string bytes;
  for (int i = 0; i < num_records; ++i) {
    bytes += static_cast<char>((first_label + i) % 10);
    for (int v = 0; v < 3072; ++v) {
      bytes += static_cast<char>((v / 1024 * 80 + v % 1024 % 32 + i) % 256);
    }
  }
  return bytes;
}

void write_cifar(const fs::path& folder, int num_records) {
  for (int i = 1; i <= 5; ++i) {
    data_test::write_file(folder / ("data_batch_" + std::to_string(i) + ".bin"),
                          cifar_file(i, num_records));
  }
  data_test::write_file(folder / "test_batch.bin", cifar_file(0, num_records));
}

// Creates a data set of three JPEG files; the second has the contents `second`.
fs::path three_images(const TempFolder& folder, const std::string& second) {
  const std::string bytes =
      data_test::tar_entry("0.jpg", sample_jpeg(0)) + data_test::tar_entry("0.cls", "0") +
      data_test::tar_entry("1.jpg", second) + data_test::tar_entry("1.cls", "1\n") +
      data_test::tar_entry("2.jpg", sample_jpeg(2)) + data_test::tar_entry("2.cls", "2");
  data_test::write_file(folder.path() / "train.tar", bytes + data_test::tar_end());
  return folder.path();
}

}  // namespace

TEST_CASE("the embedded sample is balanced and complete", "[dataset]") {
  for (auto [split, size] : {std::pair{Split::Train, 3000}, std::pair{Split::Test, 800}}) {
    const auto dataset = make_dataset({.path = kSample}, split);
    REQUIRE(dataset->size() == size);
    REQUIRE(dataset->num_classes() == 10);
    std::vector<int> count(10, 0);
    for (int64_t i = 0; i < size; ++i) {
      const auto example = dataset->get(i);
      ++count.at(static_cast<size_t>(example.target.item<int64_t>()));
      if (i == 0) {
        REQUIRE(example.data.sizes() == at::IntArrayRef({3, 32, 32}));
      }
    }
    REQUIRE(count == std::vector<int>(10, size / 10));
  }
}

TEST_CASE("JPEG files decode and resize as in Pillow", "[jpeg]") {
  std::ifstream golden(DDP_SOURCE_DIR "/tests/golden/image_golden.csv");
  REQUIRE(golden);
  const std::string bytes = sample_jpeg(0);
  ddp::detail::RgbImage image;
  ddp::detail::decode_jpeg({bytes.begin(), bytes.end()}, {"sample", 0}, 1, image);
  REQUIRE(image.width == 32);
  for (std::string line; std::getline(golden, line);) {
    std::replace(line.begin(), line.end(), ',', ' ');
    std::istringstream in(line);
    std::string name;
    int left, top, width, height, size;
    in >> name >> left >> top >> width >> height >> size;
    std::vector<float> resized;
    if (size == 0) {
      resized.assign(image.pixels.begin(), image.pixels.end());
    } else {
      ddp::detail::resample({image.pixels.data(), 32, 32}, {double(left), double(width), 32, size},
                            {double(top), double(height), 32, size}, resized);
    }
    for (float value : resized) {
      int expected = 0;
      REQUIRE(in >> expected);
      // Pillow rounds to 8 bits after each of its two passes; decoding is exact.
      REQUIRE(std::abs(value - static_cast<float>(expected)) <= (size == 0 ? 0.0f : 1.01f));
    }
  }
}

TEST_CASE("the official binary layout is read", "[dataset]") {
  TempFolder folder;
  write_cifar(folder.path() / "cifar-10-batches-bin", 3);
  const DataOptions options{
      .path = folder.path(), .augment = ddp::Augment::None, .mean = {0, 0, 0}, .std = {1, 1, 1}};
  const auto train = make_dataset(options);
  REQUIRE(train->size() == 15);
  REQUIRE(make_dataset(options, Split::Test)->size() == 3);
  const auto example = train->get(4);  // record 1 of data_batch_2
  REQUIRE(example.target.item<int64_t>() == 3);
  for (int c = 0; c < 3; ++c) {
    for (int x : {0, 5, 31}) {
      REQUIRE(example.data[c][7][x].item<float>() == static_cast<float>(c * 80 + x + 1) / 255.0f);
    }
  }
  REQUIRE(make_dataset({.path = folder.path(), .num_samples = 7})->size() == 7);
}

TEST_CASE("damaged binary files are named with their offset", "[dataset]") {
  TempFolder folder;
  write_cifar(folder.path(), 2);
  auto error = [&] {
    return message_of<ddp::DataError>([&] { make_dataset({.path = folder.path()}); });
  };
  const auto path = folder.path() / "data_batch_3.bin";
  const std::string good = data_test::read_file(path);
  for (size_t length : {size_t{1}, size_t{3072}, size_t{3074}, good.size() - 1}) {
    data_test::write_file(path, good.substr(0, length));
    REQUIRE(contains(error(), "data_batch_3.bin is truncated"));
    REQUIRE(contains(error(), "offset " + std::to_string(length / 3073 * 3073)));
  }
  std::string damaged = good;
  damaged[3073] = static_cast<char>(damaged[3073] ^ 0x40);
  data_test::write_file(path, damaged);
  REQUIRE(contains(error(), "data_batch_3.bin at offset 3073: label 68"));
  REQUIRE(contains(error(), "fix: fetch or prepare the file again"));
  fs::remove(path);
  REQUIRE(contains(error(), "cannot open data file " + path.string()));
  REQUIRE(contains(error(), "; fix: fetch or prepare the file again (data/README.md)"));
  fs::create_directory(path);
  REQUIRE(contains(error(), "not a regular file"));
}

TEST_CASE("an image folder takes its classes from sorted folder names", "[dataset]") {
  TempFolder folder;
  for (auto [name, number] :
       {std::pair{"train/zebra/b.jpg", 0}, std::pair{"train/ant/x.JPEG", 1},
        std::pair{"train/zebra/sub/a.jpg", 2}, std::pair{"val/ant/v.jpg", 3}}) {
    data_test::write_file(folder.path() / name, sample_jpeg(static_cast<size_t>(number)));
  }
  data_test::write_file(folder.path() / "train/ant/notes.txt", "no image");
  const auto train = make_dataset({.path = folder.path()});
  REQUIRE(train->size() == 3);
  REQUIRE(train->num_classes() == 2);
  REQUIRE(train->get(0).target.item<int64_t>() == 0);
  REQUIRE(train->get(1).target.item<int64_t>() == 1);
  REQUIRE(make_dataset({.path = folder.path()}, Split::Test)->size() == 1);
  fs::create_directory(folder.path() / "train/empty");
  REQUIRE(contains(message_of<ddp::DataError>([&] { make_dataset({.path = folder.path()}); }),
                   "empty holds no .jpg"));
}

TEST_CASE("a corrupt image is an error with file and offset", "[dataset]") {
  const auto cache = GENERATE(ddp::CachePolicy::Ram, ddp::CachePolicy::Off);
  const std::string good = sample_jpeg(1);
  auto error = [&](const std::string& second, int64_t max_pixels = 1'000'000) {
    TempFolder folder;
    const DataOptions options{.path = three_images(folder, second),
                              .image_size = 32,
                              .augment = ddp::Augment::None,
                              .cache = cache,
                              .max_pixels = max_pixels};
    return message_of<ddp::DataError>([&] { make_dataset(options)->get(1); });
  };
  REQUIRE(error(good).empty());
  const std::string at = "train.tar at offset 3072: ";  // 0.jpg and 0.cls take 512 + 1024 + 1024
  const std::string png = error("\x89PNG\r\n and more");
  REQUIRE(contains(png, at + "corrupt or truncated PNG of 15 bytes"));
  REQUIRE(contains(error("GIF89a"), at + "not a JPEG, PNG or WebP image (starts with 47 49 46 38"));
  REQUIRE(contains(error(""),
                   "not a JPEG, PNG or WebP image (is empty; a JPEG starts with ff d8, "
                   "a PNG with 89 50 4e 47, a WebP with 52 49 46 46, four other bytes "
                   "and 57 45 42 50)"));
  for (size_t length : {size_t{4}, size_t{300}, good.size() / 2 + 200, good.size() - 20}) {
    const std::string message = error(good.substr(0, length));
    INFO(length << " of " << good.size() << ": " << message);
    REQUIRE(contains(message, at + "corrupt"));
    REQUIRE(contains(message, "fix: prepare the file again"));
    REQUIRE(contains(message, "data.corrupt=skip"));
  }
  REQUIRE(contains(error(good, 1023), "JPEG of 32 x 32 pixels; data.max_pixels allows 1023"));
  // A flipped bit may still give a picture; otherwise it must give a DataError.
  for (size_t byte = 2; byte < good.size(); byte += 7) {
    std::string damaged = good;
    damaged[byte] = static_cast<char>(damaged[byte] ^ (1 << (byte % 8)));
    (void)error(damaged);
  }
}

TEST_CASE("skipping takes the same next good image on all ranks and keeps the limit", "[dataset]") {
  const auto cache = GENERATE(ddp::CachePolicy::Ram, ddp::CachePolicy::Off);
  TempFolder folder;
  DataOptions options{.path = three_images(folder, "no image"),
                      .image_size = 32,
                      .augment = ddp::Augment::None,
                      .corrupt = ddp::CorruptPolicy::Skip,
                      .max_corrupt_fraction = 0.34,
                      .cache = cache};
  const auto dataset = make_dataset(options);
  const auto replaced = dataset->get(1);
  REQUIRE(replaced.target.item<int64_t>() == 2);
  REQUIRE(torch::equal(replaced.data, dataset->get(2).data));
  REQUIRE(dataset->num_skipped() == 1);
  (void)dataset->get(1);
  REQUIRE(dataset->num_skipped() == 1);
  options.max_corrupt_fraction = 0.33;
  const auto message = message_of<ddp::DataError>([&] { make_dataset(options)->get(1); });
  REQUIRE(contains(message, "max_corrupt_fraction=0.33 of 3 allows 0"));
  REQUIRE(contains(message, "raise data.max_corrupt_fraction"));
  REQUIRE(contains(message, "train.tar at offset 3072"));
}

TEST_CASE("a shard missing in a numbered sequence is named", "[dataset]") {
  TempFolder folder;
  const std::string shard = data_test::tar_entry("0.jpg", sample_jpeg(0)) +
                            data_test::tar_entry("0.cls", "0") + data_test::tar_end();
  auto error = [&](const std::vector<std::string>& names) {
    for (const auto& entry : fs::directory_iterator(folder.path())) {
      fs::remove(entry.path());
    }
    for (const auto& name : names) {
      data_test::write_file(folder.path() / (name + ".tar"), shard);
    }
    return message_of<ddp::DataError>([&] { make_dataset({.path = folder.path()}); });
  };
  auto missing = [&](const std::vector<std::string>& names) {
    const auto message = error(names);
    const auto end = message.find(".tar is missing");
    if (end == std::string::npos || !contains(message, "fix: fetch or prepare")) {
      return "no message: " + message;
    }
    const auto begin = message.rfind('/', end) + 1;
    return message.substr(begin, end - begin);
  };
  REQUIRE(missing({"train-001"}) == "train-000");
  REQUIRE(missing({"train-000", "train-001", "train-003"}) == "train-002");
  REQUIRE(missing({"train-0", "train-2"}) == "train-1");
  REQUIRE(missing({"train-a-00", "train-b-01"}) == "train-b-00");
  REQUIRE(missing({"train-00-of-03", "train-01-of-03"}) == "train-02-of-03");
  REQUIRE(missing({"train-01-of-03", "train-03-of-03"}) == "train-02-of-03");
  for (const std::vector<std::string>& whole : {std::vector<std::string>{"train"},
                                                {"train-000", "train-001", "train-002"},
                                                {"train-01-of-02", "train-02-of-02"},
                                                {"train-a-00", "train-b-00"},
                                                {"train2017"},
                                                {"train1", "train2"}}) {
    INFO(whole.front());
    REQUIRE(error(whole).empty());
  }
}

TEST_CASE("a warning names both numbers if num_samples exceeds the data set", "[dataset]") {
  const auto told = [](int64_t num_samples, Split split) {
    return testing::stderr_of(
        [&] { make_dataset({.path = kSample, .num_samples = num_samples}, split); });
  };
  REQUIRE(contains(told(999, Split::Test), "data.num_samples=999, but the test split"));
  REQUIRE(contains(told(999, Split::Test), "has 800 samples"));
  REQUIRE(contains(told(3001, Split::Train), "data.num_samples=3001, but the training split"));
  REQUIRE(told(800, Split::Test).empty());
  REQUIRE(told(0, Split::Test).empty());
}

TEST_CASE("a tar data set needs its labels", "[dataset]") {
  TempFolder folder;
  auto error = [&](const std::string& entries) {
    data_test::write_file(folder.path() / "train-000.tar", entries + data_test::tar_end());
    return message_of<ddp::DataError>([&] { make_dataset({.path = folder.path()}); });
  };
  const std::string jpeg = sample_jpeg(0);
  REQUIRE(contains(error(data_test::tar_entry("0.jpg", jpeg)),
                   "0.jpg has neither a file 0.cls nor a class folder"));
  REQUIRE(contains(error(data_test::tar_entry("0.jpg", jpeg) + data_test::tar_entry("0.cls", "x")),
                   "decimal label"));
  REQUIRE(contains(error(""), "no samples"));
  {
    const testing::NamedPipe pipe(folder.path() / "classes.txt");
    REQUIRE(contains(error(data_test::tar_entry("dog/0.jpg", jpeg)),
                     pipe.path() + ": it is not a regular file"));
    REQUIRE_FALSE(pipe.was_waited_for());
  }
  data_test::write_file(folder.path() / "classes.txt", "cat\ndog\n");
  REQUIRE(error(data_test::tar_entry("dog/0.jpg", jpeg)).empty());
  REQUIRE(make_dataset({.path = folder.path()})->get(0).target.item<int64_t>() == 1);
  REQUIRE(
      contains(error(data_test::tar_entry("cow/0.jpg", jpeg)), "class cow is not in classes.txt"));
  const auto few = message_of<ddp::DataError>([&] {
    error(data_test::tar_entry("dog/0.jpg", jpeg));
    make_dataset({.path = folder.path(), .num_classes = 1});
  });
  REQUIRE(contains(few, "label 1 does not fit data.num_classes=1"));
}

TEST_CASE("a label beyond the classes of a tar data set is an error with its place", "[dataset]") {
  TempFolder folder;
  const std::string jpeg = sample_jpeg(0);
  auto write = [&](const std::string& label) {
    data_test::write_file(folder.path() / "train-000.tar",
                          data_test::tar_entry("0.jpg", jpeg) + data_test::tar_entry("0.cls", "1") +
                              data_test::tar_entry("1.jpg", jpeg) +
                              data_test::tar_entry("1.cls", label) + data_test::tar_end());
  };
  auto error = [&](const DataOptions& options) {
    return message_of<ddp::DataError>([&] { make_dataset(options); });
  };
  const DataOptions plain{.path = folder.path()};
  write("999999999");
  const std::string message = error(plain);
  REQUIRE(contains(message, "train-000.tar at offset 3072: label 999999999 is not below 65536"));
  REQUIRE(contains(message, "data.num_classes"));
  REQUIRE(contains(error({.path = folder.path(), .num_samples = 1}), "label 999999999"));
  write("65535");
  REQUIRE(error(plain).empty());
  REQUIRE(make_dataset(plain)->num_classes() == 65536);
  write("70000");
  REQUIRE(contains(error(plain), "label 70000"));
  REQUIRE(make_dataset({.path = folder.path(), .num_classes = 80000})->num_classes() == 80000);
  // classes.txt lists all classes.
  data_test::write_file(folder.path() / "classes.txt", "cat\ndog\ncow\n");
  REQUIRE(contains(error(plain), "label 70000 does not fit the 3 listed classes"));
  write("0");
  REQUIRE(make_dataset(plain)->num_classes() == 3);
}

TEST_CASE("a shard cut while training is an error, not a crash", "[dataset]") {
  TempFolder folder;
  DataOptions options{.path = three_images(folder, sample_jpeg(1)),
                      .image_size = 32,
                      .augment = ddp::Augment::None,
                      .cache = ddp::CachePolicy::Off};
  const auto dataset = make_dataset(options);
  REQUIRE_NOTHROW(dataset->get(2));
  fs::resize_file(folder.path() / "train.tar", 1000);
  REQUIRE(contains(message_of<ddp::DataError>([&] { dataset->get(2); }), "it ends at offset"));
}

TEST_CASE("impossible data settings are refused by name", "[dataset]") {
  auto settings = [](const DataOptions& options) {
    return message_of<ddp::SettingsError>([&] { make_dataset(options); });
  };
  REQUIRE(contains(
      settings({.path = kSample, .random_resized_crop = {.min_scale = 0.9, .max_scale = 0.5}}),
      "data.min_scale=0.9"));
  REQUIRE(contains(settings({.path = kSample, .mean = {0.5}}), "data.mean has 1 values"));
  REQUIRE(contains(settings({.path = kSample, .std = {1, 1, 0}}), "data.std"));
  REQUIRE(contains(settings({.path = kSample, .eval_resize = 16}), "data.eval_resize=16"));
  REQUIRE(contains(
      settings({.path = kSample, .augment = ddp::Augment::PadCrop, .cache = ddp::CachePolicy::Off}),
      "data.cache=ram"));
  // A format does not hide that nothing is there.
  for (const auto format : {ddp::DataFormat::Auto, ddp::DataFormat::Folder, ddp::DataFormat::Tar}) {
    const auto missing =
        message_of<ddp::DataError>([&] { make_dataset({.format = format, .path = "/no/such"}); });
    REQUIRE(contains(missing, "data.path=/no/such does not exist, seen from the folder /"));
    REQUIRE(contains(missing, "; fix: set data.path to a folder of images"));
  }
  for (const auto format : {ddp::DataFormat::Auto, ddp::DataFormat::Folder}) {
    REQUIRE(contains(settings({.format = format, .path = ""}),
                     "data.format=synthetic for synthetic images"));
  }
  REQUIRE(make_dataset({.format = ddp::DataFormat::Synthetic, .path = ""})->size() > 0);
  TempFolder empty;
  REQUIRE(contains(message_of<ddp::DataError>([&] { make_dataset({.path = empty.path()}); }),
                   "none of the known layouts"));
}
