// SPDX-License-Identifier: Apache-2.0
// The CPU's decoder of the images that a GPU transforms; it needs no GPU.
#include "data/images/region_decoder.hpp"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "data/sources/image_dataset.hpp"
#include "support/catch.hpp"
#include "unit/data/data_test_support.hpp"
#include "unit/data/images/jpeg_writer.hpp"
#include "unit/data/sources/tar_writer.hpp"

using ddp::JpegDecoder;
using ddp::detail::DecodedRegion;
using ddp::detail::RegionPlan;
using ddp::detail::RegionSlot;

namespace {

constexpr int64_t kNumImages = 8;
constexpr int64_t kHeaderBytes = 40;

std::shared_ptr<ddp::Dataset> make_images(const data_test::TempFolder& folder) {
  std::string tar;
  for (int i = 0; i < kNumImages; ++i) {
    const std::string key = std::to_string(i);
    tar += data_test::tar_entry(
        key + ".jpg", data_test::make_jpeg(80 + 9 * i, 70, TJSAMP_420, static_cast<uint64_t>(i)));
    tar += data_test::tar_entry(key + ".cls", std::to_string(i % 3));
  }
  data_test::write_file(folder.path() / "train.tar", tar + data_test::tar_end());
  return ddp::make_dataset({.path = folder.path(),
                            .image_size = 48,
                            .augment = ddp::Augment::RandomResizedCrop,
                            .cache = ddp::CachePolicy::Off});
}

int64_t num_bytes(const RegionPlan& plan) {
  return int64_t{plan.region.width} * plan.region.height * 3;
}

// One thread per sample, as in the loader.
void fill(ddp::detail::RegionDecoder& decoder, int64_t num_samples, int64_t epoch) {
  decoder.resize(0, num_samples);
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < num_samples; ++i) {
    threads.emplace_back([&decoder, i, epoch] { decoder.fill(0, i, i, epoch); });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  decoder.finish(0);
}

}  // namespace

TEST_CASE("decoded regions have the data set's pixels, in the block or beside it") {
  data_test::TempFolder folder;
  const auto dataset = make_images(folder);
  const auto& images = *ddp::detail::as_images(*dataset);
  // The block holds all regions, some of them or none.
  const int64_t room = GENERATE(1'000'000, 30'000, 0);
  std::vector<RegionSlot> slots(1);
  RegionSlot& slot = slots[0];
  slot.reserve(kHeaderBytes, room, /*pinned=*/false);
  const auto decoder = ddp::detail::make_region_decoder(
      JpegDecoder::Cpu, {.images = images, .slots = slots, .device = at::kCPU});
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    CAPTURE(room, epoch);
    const int64_t num_samples = epoch == 1 ? 1 : kNumImages;  // a short batch between two others
    fill(*decoder, num_samples, epoch);
    REQUIRE(std::ssize(slot.samples()) == num_samples);
    std::vector<std::pair<int64_t, int64_t>> parts = {{0, kHeaderBytes}};
    int num_overflows = 0;
    for (int64_t i = 0; i < num_samples; ++i) {
      const DecodedRegion& sample = slot.sample(i);
      RegionPlan plan;
      std::vector<uint8_t> expected;
      const int64_t target = images.read_region(i, epoch, plan, [&](const RegionPlan& p) {
        expected.resize(static_cast<size_t>(num_bytes(p)));
        return expected.data();
      });
      REQUIRE(sample.target == target);
      REQUIRE(sample.plan.region.x == plan.region.x);
      REQUIRE(num_bytes(sample.plan) == std::ssize(expected));
      const uint8_t* pixels = sample.overflow.data();
      if (sample.offset >= 0) {
        pixels = slot.block().const_data_ptr<uint8_t>() + sample.offset;
        parts.emplace_back(sample.offset, sample.offset + std::ssize(expected));
      } else {
        ++num_overflows;
      }
      REQUIRE(std::equal(expected.begin(), expected.end(), pixels));
    }
    // No two parts of the block overlap.
    std::sort(parts.begin(), parts.end());
    for (size_t i = 1; i < parts.size(); ++i) {
      REQUIRE(parts[i - 1].second <= parts[i].first);
    }
    REQUIRE(parts.back().second <= slot.used_bytes());
    REQUIRE(slot.used_bytes() <= slot.block().numel());
    if (num_samples == kNumImages) {
      REQUIRE((num_overflows > 0) == (room < 1'000'000));
      REQUIRE((parts.size() > 1) == (room > 0));
    }
  }
}

TEST_CASE("an image that replaces a corrupt one has its own memory") {
  std::vector<RegionSlot> slots(1);
  RegionSlot& slot = slots[0];
  slot.reserve(kHeaderBytes, 100, /*pinned=*/false);
  slot.reset(1);
  uint8_t device_memory[1] = {};
  slot.sample(0).on_device = device_memory;
  const uint8_t* large = slot.allocate(0, 1000);
  CHECK(large == slot.sample(0).overflow.data());
  CHECK(slot.sample(0).offset == -1);
  CHECK(slot.sample(0).on_device == nullptr);
  const uint8_t* small = slot.allocate(0, 90);
  CHECK(small == slot.block().const_data_ptr<uint8_t>() + slot.sample(0).offset);
  CHECK(slot.allocate(0, 1000) == slot.sample(0).overflow.data());
  CHECK(slot.sample(0).offset == -1);
}

TEST_CASE("the values of loader.jpeg_decoder name the enumerators") {
  const std::vector<std::pair<std::string, JpegDecoder>> expected = {
      {"cpu", JpegDecoder::Cpu}, {"nvjpeg", JpegDecoder::NvJpeg}};
  REQUIRE((ddp::detail::jpeg_decoder_names() == expected));
}
