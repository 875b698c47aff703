// SPDX-License-Identifier: Apache-2.0
// CIFAR-100's binary files and MNIST's IDX files.
#include <sys/resource.h>
#include <torch/torch.h>
#include <zlib.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "data/images/resident_images.hpp"
#include "data/sources/image_dataset.hpp"
#include "ddp/core/error.hpp"
#include "ddp/data/data_loader.hpp"
#include "support/catch.hpp"
#include "unit/data/data_test_support.hpp"

namespace fs = std::filesystem;
using data_test::contains;
using data_test::message_of;
using data_test::TempFolder;
using data_test::write_file;
using ddp::DataFormat;
using ddp::DataOptions;
using ddp::make_dataset;
using ddp::Split;

namespace {

std::string big_endian(uint32_t value) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) {
    bytes += static_cast<char>(value >> shift);
  }
  return bytes;
}

uint8_t value_of(int image, int pixel) {
  return static_cast<uint8_t>(image * 40 + pixel % 28 * 3 + pixel / 28);
}

std::string idx_images(int count) {
  std::string bytes = big_endian(0x803) + big_endian(static_cast<uint32_t>(count)) +
                      big_endian(28) + big_endian(28);
  for (int i = 0; i < count; ++i) {
    for (int p = 0; p < 28 * 28; ++p) {
      bytes += static_cast<char>(value_of(i, p));
    }
  }
  return bytes;
}

std::string idx_labels(int count) {
  std::string bytes = big_endian(0x801) + big_endian(static_cast<uint32_t>(count));
  for (int i = 0; i < count; ++i) {
    bytes += static_cast<char>((3 * i + 1) % 10);
  }
  return bytes;
}

std::string gzip(const std::string& bytes) {
  z_stream stream{};
  if (deflateInit2(&stream, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY) != Z_OK) {
    throw std::runtime_error("deflateInit2 failed");
  }
  std::string out(deflateBound(&stream, bytes.size()), '\0');
  stream.next_in = reinterpret_cast<uint8_t*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<uint8_t*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  const int status = deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  if (status != Z_STREAM_END) {
    throw std::runtime_error("deflate failed");
  }
  return out;
}

void write_mnist(const fs::path& folder, int train, int test) {
  write_file(folder / "train-images-idx3-ubyte", idx_images(train));
  write_file(folder / "train-labels-idx1-ubyte", idx_labels(train));
  write_file(folder / "t10k-images-idx3-ubyte", idx_images(test));
  write_file(folder / "t10k-labels-idx1-ubyte", idx_labels(test));
}

std::string cifar100_file(int num_records) {
  std::string bytes;
  for (int i = 0; i < num_records; ++i) {
    bytes += static_cast<char>(i % 20);
    bytes += static_cast<char>(99 - i);
    for (int v = 0; v < 3072; ++v) {
      bytes += static_cast<char>((v / 1024 * 80 + v % 1024 % 32 + i) % 256);
    }
  }
  return bytes;
}

std::string hundred_names() {
  std::string names;
  for (int i = 0; i < 100; ++i) {
    names += "class_" + std::to_string(i) + '\n';
  }
  return names;
}

std::string data_error(const DataOptions& options, Split split = Split::Train) {
  return message_of<ddp::DataError>([&] { (void)make_dataset(options, split); });
}

}  // namespace

TEST_CASE("CIFAR-10's classes have the names of batches.meta.txt, or the known ones",
          "[known_sets]") {
  TempFolder folder;
  write_file(folder.path() / "test_batch.bin", std::string(3073, '\3'));
  const auto names = [&] {
    return make_dataset({.path = folder.path()}, Split::Test)->class_names();
  };
  CHECK(names().size() == 10);
  CHECK(names().at(3) == "cat");
  write_file(folder.path() / "batches.meta.txt", "a\nb\nc\nd\ne\nf\ng\nh\ni\nj\n\n");
  CHECK(names().at(3) == "d");
  write_file(folder.path() / "batches.meta.txt", "a\nb\nc\nd\n");
  CHECK(names().at(3) == "cat");
}

TEST_CASE("MNIST's files give grey images without augmentation", "[known_sets]") {
  TempFolder folder;
  const bool packed = GENERATE(false, true);
  const auto place =
      folder.path() / GENERATE(as<std::string>{}, "", "raw", "MNIST/raw", "FashionMNIST/raw");
  write_mnist(place, 5, 3);
  if (packed) {
    for (const char* name : {"train-images-idx3-ubyte", "train-labels-idx1-ubyte"}) {
      write_file(place / (std::string(name) + ".gz"), gzip(data_test::read_file(place / name)));
      fs::remove(place / name);
    }
  }
  for (const auto format : {DataFormat::Auto, DataFormat::Mnist}) {
    const auto train = make_dataset({.format = format, .path = folder.path()});
    REQUIRE(train->size() == 5);
    REQUIRE(train->num_classes() == 10);
    REQUIRE(make_dataset({.format = format, .path = folder.path()}, Split::Test)->size() == 3);
    for (int i = 0; i < 5; ++i) {
      const auto example = train->get_for_epoch(i, 2);
      REQUIRE(example.data.sizes() == at::IntArrayRef({1, 28, 28}));
      CHECK(example.target.item<int64_t>() == (3 * i + 1) % 10);
      for (int p = 0; p < 28 * 28; ++p) {
        const float expected = (static_cast<float>(value_of(i, p)) / 255.0f - 0.1307f) / 0.3081f;
        REQUIRE(example.data[0][p / 28][p % 28].item<float>() == expected);
      }
    }
  }
}

TEST_CASE("MNIST can have three channels and augmentation", "[known_sets]") {
  TempFolder folder;
  write_mnist(folder.path(), 4, 4);
  const auto grey = make_dataset({.path = folder.path()});
  const auto rgb = make_dataset({.path = folder.path(), .channels = 3});
  CHECK(torch::equal(rgb->get(3).data, grey->get(3).data.expand({3, 28, 28})));
  const auto moved = make_dataset({.path = folder.path(), .augment = ddp::Augment::PadCrop});
  CHECK(!torch::equal(moved->get(3).data, grey->get(3).data));
#ifdef DDP_HAS_CUDA
  CHECK(ddp::detail::why_not_resident(*grey, at::Device(at::kCUDA, 0)).empty());
#endif
  CHECK(contains(message_of<ddp::SettingsError>(
                     [&] { (void)make_dataset({.path = folder.path(), .image_size = 32}); }),
                 "data.image_size=32 must be 28 with data.format=mnist"));
}

TEST_CASE("damaged MNIST files are named with the place", "[known_sets]") {
  TempFolder folder;
  const DataOptions options{.path = folder.path()};
  const std::string images = "train-images-idx3-ubyte", labels = "train-labels-idx1-ubyte";
  const auto error_with = [&](const std::string& name, const std::string& bytes) {
    write_mnist(folder.path(), 4, 4);
    write_file(folder.path() / name, bytes);
    return data_error(options);
  };
  std::string wrong = idx_images(4);
  CHECK(error_with(images, wrong).empty());
  wrong[3] = 1;
  CHECK(contains(error_with(images, wrong), images + " at offset 0: its magic number is 2049"));
  wrong = idx_images(4);
  wrong[11] = 27;
  CHECK(contains(error_with(images, wrong), images + " at offset 8: images have 27 rows"));
  wrong[11] = 28;
  wrong[14] = 1;
  CHECK(contains(error_with(images, wrong), images + " at offset 12: images have 284 columns"));
  CHECK(contains(error_with(images, idx_images(4).substr(0, 2000)),
                 images + " at offset 2000: the file has 2000 bytes, but its 4 items need 3152"));
  CHECK(contains(error_with(images, idx_images(4) + "x"),
                 images + " at offset 3152: the file has 3153 bytes"));
  CHECK(contains(error_with(images, big_endian(0x803)), "the file ends within its header of 16"));
  CHECK(
      contains(error_with(images, idx_images(0)), images + " at offset 4: the file has no items"));
  CHECK(contains(error_with(labels, idx_labels(3)), labels + " at offset 4: 3 labels, but "));
  wrong = idx_labels(4);
  wrong[10] = 10;
  CHECK(contains(error_with(labels, wrong), labels + " at offset 10: label 10; labels are 0 to 9"));
  fs::remove(folder.path() / labels);
  CHECK(contains(data_error(options), "cannot open data file"));
}

TEST_CASE("damaged gzip files are named with the place", "[known_sets]") {
  TempFolder folder;
  write_mnist(folder.path(), 4, 4);
  const std::string images = "train-images-idx3-ubyte", packed = gzip(idx_images(4));
  fs::remove(folder.path() / images);
  const auto error_with = [&](const std::string& bytes) {
    write_file(folder.path() / (images + ".gz"), bytes);
    return data_error({.path = folder.path()});
  };
  CHECK(error_with(packed).empty());
  const auto half = packed.size() / 2;
  CHECK(contains(error_with(packed.substr(0, half)),
                 images + ".gz at offset " + std::to_string(half) + ": the file ends early"));
  std::string wrong = packed;
  wrong[wrong.size() - 8] = static_cast<char>(wrong[wrong.size() - 8] ^ 1);
  CHECK(contains(error_with(wrong), "incorrect data check"));
  CHECK(contains(error_with(packed + "more"),
                 ": 4 bytes follow the end of the compressed data; fix: decompress it"));
}

TEST_CASE("a gzip file is expanded to the size in its header only", "[known_sets]") {
  // A MiB of zeros as one block, which may follow itself any number of times: its compressor was
  // flushed at the end.
  const auto flushed = [](const std::string& bytes) {
    std::string block(bytes.size() + 1024, '\0'), input = bytes;
    z_stream stream{};
    REQUIRE(deflateInit2(&stream, 9, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY) == Z_OK);
    stream.next_in = reinterpret_cast<uint8_t*>(input.data());
    stream.avail_in = static_cast<uInt>(input.size());
    stream.next_out = reinterpret_cast<uint8_t*>(block.data());
    stream.avail_out = static_cast<uInt>(block.size());
    REQUIRE(deflate(&stream, Z_FULL_FLUSH) == Z_OK);
    block.resize(stream.total_out);
    deflateEnd(&stream);
    return block;
  };
  const std::string zeros = flushed(std::string(1 << 20, '\0'));
  constexpr size_t kHeader = 10;
  const auto error_of = [&](const std::string& start) {
    std::string packed = flushed(start);
    for (int mib = 0; mib < 1500; ++mib) {
      packed.append(zeros, kHeader);
    }
    TempFolder folder;
    write_mnist(folder.path(), 4, 4);
    fs::remove(folder.path() / "train-images-idx3-ubyte");
    write_file(folder.path() / "train-images-idx3-ubyte.gz", packed);
    return data_error({.path = folder.path()});
  };
  const auto peak_kilobytes = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return int64_t{usage.ru_maxrss};
  };
  const int64_t before = peak_kilobytes();
  CHECK(
      contains(error_of(idx_images(4)),
               "train-images-idx3-ubyte.gz at offset 3152: the file has more than 3152 bytes, but "
               "its 4 items need 3152"));
  std::string many = idx_images(4);
  many.replace(4, 4, big_endian(3'000'000));
  CHECK(contains(error_of(many),
                 ".gz at offset 4: its 3000000 items need 2352000000 bytes; the "
                 "limit is 1073741824"));
  CHECK(contains(error_of(std::string(8, '\0')), ".gz at offset 0: its magic number is 0"));
  CHECK(peak_kilobytes() - before < int64_t{100} << 10);
  // More items than data.
  many.replace(4, 4, big_endian(1'000'000));
  TempFolder folder;
  write_mnist(folder.path(), 4, 4);
  fs::remove(folder.path() / "train-images-idx3-ubyte");
  write_file(folder.path() / "train-images-idx3-ubyte.gz", gzip(many));
  CHECK(contains(data_error({.path = folder.path()}),
                 ".gz at offset 3152: the file has 3152 bytes, but its 1000000 items need "
                 "784000016"));
}

TEST_CASE("two MNIST sets in one folder are not chosen from", "[known_sets]") {
  TempFolder folder;
  write_mnist(folder.path() / "MNIST" / "raw", 4, 4);
  write_mnist(folder.path() / "FashionMNIST" / "raw", 4, 4);
  CHECK(contains(data_error({.path = folder.path()}), "holds two data sets"));
  CHECK(data_error({.path = folder.path() / "FashionMNIST"}).empty());
  CHECK(contains(data_error({.format = DataFormat::Mnist, .path = folder.path() / "none"}),
                 "holds no MNIST files"));
}

TEST_CASE("files of two formats are not chosen from", "[known_sets]") {
  TempFolder folder;
  write_mnist(folder.path(), 4, 4);
  CHECK(data_error({.path = folder.path()}).empty());
  const auto [file, format] = GENERATE(table<std::string, std::string>(
      {{"cifar-10-batches-bin/test_batch.bin", "data.format=cifar10 and of data.format=mnist"},
       {"val/0.tar", "data.format=mnist and of data.format=tar"},
       {"train/cat/0.jpg", "data.format=mnist and of data.format=folder"}}));
  write_file(folder.path() / file, "any");
  CHECK(contains(data_error({.path = folder.path()}),
                 "holds files of " + format + "; fix: set data.format to one of them"));
  CHECK(data_error({.format = DataFormat::Mnist, .path = folder.path()}).empty());
}

TEST_CASE("CIFAR-100's files are read by their fine labels", "[known_sets]") {
  TempFolder folder;
  const auto place = folder.path() / GENERATE(as<std::string>{}, "", "cifar-100-binary");
  write_file(place / "train.bin", cifar100_file(3));
  write_file(place / "test.bin", cifar100_file(2));
  write_file(place / "fine_label_names.txt", hundred_names());
  for (const auto format : {DataFormat::Auto, DataFormat::Cifar100}) {
    const auto train =
        make_dataset({.format = format, .path = folder.path(), .augment = ddp::Augment::None});
    REQUIRE(train->size() == 3);
    REQUIRE(train->num_classes() == 100);
    REQUIRE(train->class_names().at(99) == "class_99");
    REQUIRE(make_dataset({.format = format, .path = folder.path()}, Split::Test)->size() == 2);
    const auto example = train->get(2);
    CHECK(example.target.item<int64_t>() == 97);
    CHECK(example.data.sizes() == at::IntArrayRef({3, 32, 32}));
    CHECK(example.data[1][0][5].item<float>() == ((80 + 5 + 2) / 255.0f - 0.4865f) / 0.2564f);
  }
  CHECK(make_dataset({.path = folder.path(), .channels = 1})->get(0).data.size(0) == 1);
}

TEST_CASE("damaged CIFAR-100 files are named with the place", "[known_sets]") {
  TempFolder folder;
  const DataOptions options{.format = DataFormat::Cifar100, .path = folder.path()};
  const auto error_with = [&](const std::string& bytes) {
    write_file(folder.path() / "train.bin", bytes);
    return data_error(options);
  };
  CHECK(contains(error_with(cifar100_file(2)), "holds no CIFAR-100 binary files"));
  // train.bin alone may be any data set's.
  CHECK(contains(data_error({.path = folder.path()}), "holds none of the known layouts"));
  write_file(folder.path() / "fine_label_names.txt", hundred_names());
  CHECK(error_with(cifar100_file(2)).empty());
  CHECK(contains(error_with(cifar100_file(2).substr(0, 6000)),
                 "6000 bytes are not a multiple of a record's 3074; the last complete record ends "
                 "at offset 3074"));
  std::string wrong = cifar100_file(2);
  wrong[3074] = 20;
  CHECK(contains(error_with(wrong), "train.bin at offset 3074: label 20; labels are 0 to 19"));
  wrong = cifar100_file(2);
  wrong[3075] = 100;
  CHECK(contains(error_with(wrong), "train.bin at offset 3075: label 100; labels are 0 to 99"));
  write_file(folder.path() / "fine_label_names.txt", "apple\n");
  CHECK(contains(error_with(cifar100_file(2)),
                 "fine_label_names.txt: the file has 1 names, but needs 100, one per line"));
  fs::remove(folder.path() / "fine_label_names.txt");
  fs::create_directory(folder.path() / "fine_label_names.txt");
  CHECK(contains(error_with(cifar100_file(2)),
                 "fine_label_names.txt: it is not a regular file; fix: "));
}
