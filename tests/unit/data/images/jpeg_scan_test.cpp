// SPDX-License-Identifier: Apache-2.0
// Selects the files that may go to a decoder without damage detection.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "data/images/nvjpeg/jpeg_scan.hpp"
#include "ddp/data/data_loader.hpp"
#include "support/catch.hpp"
#include "support/stderr_of.hpp"
#include "unit/data/data_test_support.hpp"
#include "unit/data/images/jpeg_writer.hpp"
#include "unit/data/sources/tar_writer.hpp"

namespace {

using Bytes = std::vector<uint8_t>;

Bytes jpeg(int subsampling = TJSAMP_420, int flags = 0) {
  const std::string text = data_test::make_jpeg(97, 61, subsampling, 3, 85, flags);
  return {text.begin(), text.end()};
}

// The first byte after the marker 0xff `marker`.
size_t behind(const Bytes& bytes, uint8_t marker) {
  const uint8_t pattern[] = {0xff, marker};
  const auto found =
      std::search(bytes.begin(), bytes.end(), std::begin(pattern), std::end(pattern));
  REQUIRE(found != bytes.end());
  return static_cast<size_t>(found - bytes.begin()) + 2;
}

bool is_plain(const Bytes& bytes) {
  return ddp::detail::is_plain_baseline(bytes);
}

Bytes with(Bytes bytes, size_t at, uint8_t value) {
  bytes[at] = value;
  return bytes;
}

Bytes with_segment(Bytes bytes, const Bytes& segment) {
  bytes.insert(bytes.begin() + 2, segment.begin(), segment.end());
  return bytes;
}

}  // namespace

TEST_CASE("whole baseline images of the usual samplings are plain") {
  for (const int subsampling : {TJSAMP_444, TJSAMP_422, TJSAMP_440, TJSAMP_420, TJSAMP_GRAY}) {
    CAPTURE(subsampling);
    REQUIRE(is_plain(jpeg(subsampling)));
  }
  auto bytes = jpeg();
  bytes.insert(bytes.end(), 100, 0);  // padding after the end
  REQUIRE(is_plain(bytes));
  REQUIRE(is_plain(with_segment(jpeg(), {0xff, 0xfe, 0, 5, 'a', 0xff, 0xda})));  // a comment
}

TEST_CASE("a file is not read beyond its end") {
  // The memory after the bytes is unreadable.
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* pages = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(pages != MAP_FAILED);
  uint8_t* end = static_cast<uint8_t*>(pages) + page;
  REQUIRE(mprotect(end, page, PROT_NONE) == 0);
  const auto at_end = [&](const Bytes& bytes) {
    std::copy(bytes.begin(), bytes.end(), end - bytes.size());
    return ddp::detail::is_plain_baseline(std::span(end - bytes.size(), bytes.size()));
  };
  // Frames of 0 to 4 components; with 0 components, the frame ends after its own six bytes.
  for (uint8_t num_components = 0; num_components <= 4; ++num_components) {
    Bytes bytes = {0xff, 0xd8, 0xff, 0xc0, 0, static_cast<uint8_t>(8 + 3 * num_components),
                   8,    0,    1,    0,    1, num_components};
    bytes.resize(bytes.size() + size_t{3} * num_components, 0x11);
    CAPTURE(num_components);
    REQUIRE_FALSE(at_end(bytes));
  }
  const auto whole = jpeg();
  REQUIRE(at_end(whole));
  for (size_t length = 0; length < 700; ++length) {
    REQUIRE_FALSE(at_end(Bytes(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(length))));
  }
  REQUIRE(munmap(pages, 2 * page) == 0);
}

TEST_CASE("images that a batch decoder refuses are found, and all others are decoded once") {
  const std::vector<size_t> bad = GENERATE(
      std::vector<size_t>{}, std::vector<size_t>{0}, std::vector<size_t>{12},
      std::vector<size_t>{3, 4, 11}, std::vector<size_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
  std::vector<int> decoded(13);
  int num_calls = 0;
  const auto refused = ddp::detail::refused_images(13, [&](size_t first, size_t last) {
    ++num_calls;
    REQUIRE(first < last);
    const bool good =
        std::none_of(bad.begin(), bad.end(), [&](size_t i) { return first <= i && i < last; });
    for (size_t i = first; good && i < last; ++i) {
      ++decoded[i];
    }
    return good;
  });
  REQUIRE(refused == bad);
  for (size_t i = 0; i < decoded.size(); ++i) {
    REQUIRE(decoded[i] == (std::find(bad.begin(), bad.end(), i) == bad.end() ? 1 : 0));
  }
  if (bad.size() <= 1) {
    REQUIRE(num_calls <= (bad.empty() ? 1 : 9));  // halves of 13 images: four levels
  }
  REQUIRE(ddp::detail::refused_images(0, [](size_t, size_t) { return false; }).empty());
}

TEST_CASE("a batch whose decoder throws is not bisected") {
  int num_calls = 0;
  REQUIRE_THROWS_AS(ddp::detail::refused_images(13,
                                                [&](size_t, size_t) -> bool {
                                                  ++num_calls;
                                                  throw std::runtime_error("no memory");
                                                }),
                    std::runtime_error);
  REQUIRE(num_calls == 1);
}

TEST_CASE("an nvJPEG status means a refused image, no memory or a failure") {
  using ddp::detail::nvjpeg_answer;
  using ddp::detail::NvJpegAnswer;
  for (const bool saw_images : {false, true}) {
    CAPTURE(saw_images);
    REQUIRE(nvjpeg_answer(0, saw_images) == NvJpegAnswer::Decoded);
    REQUIRE(nvjpeg_answer(5, saw_images) == NvJpegAnswer::NoMemory);
    for (const int status : {1, 7, 11, -1}) {
      CAPTURE(status);
      REQUIRE(nvjpeg_answer(status, saw_images) == NvJpegAnswer::Failed);
    }
  }
  for (const int status : {2, 3, 4, 6, 8, 9, 10}) {
    CAPTURE(status);
    REQUIRE(nvjpeg_answer(status, true) == NvJpegAnswer::Refused);
    REQUIRE(nvjpeg_answer(status, false) == NvJpegAnswer::Failed);
  }
}

TEST_CASE("other kinds of JPEG are left to libjpeg-turbo") {
  REQUIRE_FALSE(is_plain({}));
  REQUIRE_FALSE(is_plain({0xff, 0xd8, 0xff, 0xd9}));
  REQUIRE_FALSE(is_plain(jpeg(TJSAMP_420, TJFLAG_PROGRESSIVE)));
  REQUIRE_FALSE(is_plain(jpeg(TJSAMP_411)));
  const auto bytes = jpeg(TJSAMP_444);
  const size_t frame = behind(bytes, 0xc0);
  REQUIRE_FALSE(is_plain(with(bytes, frame + 2, 12)));  // bits
  auto rgb = bytes;
  rgb[frame + 8] = 'R';
  rgb[frame + 11] = 'G';
  rgb[frame + 14] = 'B';
  REQUIRE_FALSE(is_plain(rgb));
  const auto adobe = [](uint8_t transform) {
    return Bytes{0xff, 0xee, 0, 14, 'A', 'd', 'o', 'b', 'e', 0, 100, 0, 0, 0, 0, transform};
  };
  REQUIRE(is_plain(with_segment(bytes, adobe(1))));
  REQUIRE_FALSE(is_plain(with_segment(bytes, adobe(0))));
}

TEST_CASE("a file that is truncated or has invalid bytes in its scan is not plain") {
  const auto bytes = jpeg();
  const size_t scan = behind(bytes, 0xda) + 12;
  for (size_t length :
       {bytes.size() - 1, bytes.size() - 2, scan + 50, scan, scan - 5, size_t{100}}) {
    CAPTURE(length);
    REQUIRE_FALSE(is_plain(Bytes(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(length))));
  }
  auto damaged = bytes;
  damaged[scan + 200] = 0xff;
  damaged[scan + 201] = 0x5a;
  REQUIRE_FALSE(is_plain(damaged));
  // A restart marker is valid only in its turn.
  damaged[scan + 201] = 0xd0;
  REQUIRE(is_plain(damaged));
  damaged[scan + 201] = 0xd1;
  REQUIRE_FALSE(is_plain(damaged));
}

TEST_CASE("on a CPU loader.jpeg_decoder=nvjpeg has no effect, which is logged once") {
  data_test::TempFolder folder;
  std::string tar;
  for (int i = 0; i < 6; ++i) {
    tar += data_test::tar_entry(std::to_string(i) + ".jpg", data_test::make_jpeg(80 + i, 70));
    tar += data_test::tar_entry(std::to_string(i) + ".cls", "0");
  }
  data_test::write_file(folder.path() / "train.tar", tar + data_test::tar_end());
  const auto dataset = ddp::make_dataset({.path = folder.path(),
                                          .image_size = 48,
                                          .augment = ddp::Augment::RandomResizedCrop,
                                          .cache = ddp::CachePolicy::Off});
  const ddp::DistributedSampler sampler(6, 0, 1);
  ddp::DataLoader cpu(dataset, sampler, at::kCPU, {.batch_size = 6});
  const auto expected = cpu.next().data;
  const std::string told = testing::stderr_of([&] {
    for (int i = 0; i < 2; ++i) {
      ddp::DataLoader asked(dataset, sampler, at::kCPU,
                            {.batch_size = 6, .jpeg_decoder = ddp::JpegDecoder::NvJpeg});
      REQUIRE(torch::equal(asked.next().data, expected));
    }
  });
  CAPTURE(told);
  REQUIRE(testing::num_found(told, "loader.jpeg_decoder=nvjpeg is not used: the device is cpu") ==
          1);
  REQUIRE(testing::num_found(told, "decode with libjpeg-turbo") == 1);
}
