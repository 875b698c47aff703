// SPDX-License-Identifier: Apache-2.0
// Properties of GPU-made batches that a CPU can check: the value of a pixel, the order of an epoch,
// and the choice of the GPU. tests/gpu/data/device_images_test.cpp tests the rest.
#include <torch/torch.h>

#include <memory>
#include <vector>

#include "data/images/resident_images.hpp"
#include "data/loader/batch_plan.hpp"
#include "data/sources/image_dataset.hpp"
#include "ddp/data/data_loader.hpp"
#include "support/catch.hpp"
#include "unit/data/data_test_support.hpp"
#include "unit/data/sources/cifar10_sample.hpp"

using data_test::contains;
using data_test::kCpu;
using data_test::kSample;
using data_test::message_of;
using ddp::Augment;
using ddp::DataLoader;
using ddp::DistributedSampler;

namespace {

struct Indices {
  int64_t length;
  int64_t size() const { return length; }
  int64_t get(int64_t index) const { return index; }
};
std::vector<int64_t> keep(std::vector<int64_t> indices) {
  return indices;
}

}  // namespace

TEST_CASE("the definition of each value of a batch equals the CPU's transform", "[device_images]") {
  const auto augment = GENERATE(Augment::PadCrop, Augment::None);
  const int64_t cutout = GENERATE(0, 7);
  const bool flip = GENERATE(true, false);
  const auto dataset = ddp::make_dataset({.path = kSample,
                                          .num_samples = 48,
                                          .seed = 3,
                                          .augment = augment,
                                          .pad = 5,
                                          .flip = flip,
                                          .cutout = cutout});
  const auto* images = ddp::detail::as_images(*dataset);
  REQUIRE(images != nullptr);
  REQUIRE(images->decoded() != nullptr);
  const auto transform = images->transform().small_image_transform();
  REQUIRE(transform);
  for (int64_t epoch : {0, 2}) {
    for (int64_t i = 0; i < 48; ++i) {
      const auto expected = dataset->get_for_epoch(i, epoch).data;
      const auto crop = ddp::detail::draw_small_image(*transform, static_cast<uint64_t>(epoch),
                                                      static_cast<uint64_t>(i));
      const uint8_t* image = images->decoded()->pixels.data() + i * 32 * 32 * 3;
      torch::Tensor made = torch::empty({3, 32, 32});
      auto out = made.accessor<float, 3>();
      for (int c = 0; c < 3; ++c) {
        for (int y = 0; y < 32; ++y) {
          for (int x = 0; x < 32; ++x) {
            const int byte = ddp::detail::small_image_byte(image, *transform, crop, x, y, c);
            const bool is_cut = byte < 0;
            out[c][y][x] = is_cut
                               ? 0.0f
                               : ddp::detail::normalise_byte(static_cast<uint8_t>(byte),
                                                             transform->mean[c], transform->std[c]);
          }
        }
      }
      REQUIRE(torch::equal(made, expected));
    }
  }
}

TEST_CASE("an epoch planned at once equals the loader's batches one by one", "[device_images]") {
  const bool drop_last = GENERATE(false, true);
  const bool pad = GENERATE(true, false);
  const int64_t global_batch = GENERATE(12, 13);  // 3 ranks share 13 unevenly
  for (int rank = 0; rank < 3; ++rank) {
    DistributedSampler sampler(100, rank, 3, {.seed = 4, .pad = pad});
    DataLoader loader(std::make_shared<Indices>(Indices{100}), sampler, kCpu,
                      {.global_batch_size = global_batch, .drop_last = drop_last}, keep);
    for (int64_t epoch : {0, 1}) {
      const auto plan = ddp::detail::plan_epoch(sampler, epoch, 0, global_batch, drop_last);
      REQUIRE(plan.epoch == epoch);
      REQUIRE(static_cast<int64_t>(plan.batches.size()) == loader.num_batches());
      size_t at = 0;
      for (size_t b = 0; b < plan.batches.size(); ++b) {
        REQUIRE(loader.epoch() == epoch);
        const auto indices = loader.next();
        REQUIRE(static_cast<int64_t>(indices.size()) == plan.batches[b].size);
        for (int64_t index : indices) {
          REQUIRE(plan.indices.at(at++) == index);
        }
        if (b + 1 < plan.batches.size()) {
          REQUIRE(loader.position() == plan.batches[b].end);
          const auto rest =
              ddp::detail::plan_epoch(sampler, epoch, loader.position(), global_batch, drop_last);
          REQUIRE(std::equal(rest.indices.begin(), rest.indices.end(),
                             plan.indices.begin() + static_cast<int64_t>(at), plan.indices.end()));
        }
      }
      REQUIRE(at == plan.indices.size());
    }
  }
}

TEST_CASE("images stay on the host if the GPU cannot hold them", "[device_images]") {
  const auto dataset = ddp::make_dataset({.path = kSample, .num_samples = 32});
  const DistributedSampler sampler(32, 0, 1);
  DataLoader loader(dataset, sampler, kCpu);
  REQUIRE(loader.device_images() == nullptr);
  REQUIRE(loader.next().data.is_cpu());
  const std::string message = message_of<ddp::SettingsError>([&] {
    DataLoader refused(dataset, sampler, kCpu, {.device_resident = ddp::DevicePolicy::On});
  });
  REQUIRE(contains(message, "loader.device_resident=on"));
  REQUIRE(contains(message, "context.device=cuda"));
  const at::Device gpu(at::kCUDA, 0);
#ifdef DDP_HAS_CUDA
  using ddp::DeviceImageLoader;
  REQUIRE(ddp::detail::why_not_resident(*dataset, gpu).empty());
  REQUIRE(ddp::detail::keeps_images_on_device(*dataset, gpu, {}));
  REQUIRE_FALSE(
      ddp::detail::keeps_images_on_device(*dataset, gpu, {.device_resident_limit_mb = 0}));
  REQUIRE_FALSE(ddp::detail::keeps_images_on_device(*dataset, gpu,
                                                    {.device_resident = ddp::DevicePolicy::Off}));
  // Cropped again per batch, decoded again per batch, no images at all.
  const auto cropped = ddp::make_dataset(
      {.path = kSample, .num_samples = 32, .augment = Augment::RandomResizedCrop});
  REQUIRE(contains(ddp::detail::why_not_resident(*cropped, gpu), "data.augment=pad_crop"));
  const auto uncached = ddp::make_dataset({.path = kSample,
                                           .num_samples = 32,
                                           .augment = Augment::None,
                                           .cache = ddp::CachePolicy::Off});
  REQUIRE(contains(ddp::detail::why_not_resident(*uncached, gpu), "data.cache=ram"));
  const auto synthetic = ddp::make_dataset({.format = ddp::DataFormat::Synthetic});
  REQUIRE(!ddp::detail::why_not_resident(*synthetic, gpu).empty());
#endif
}

TEST_CASE("loader.image_dtype rounds the same floats", "[device_images]") {
  const auto dataset = ddp::make_dataset({.path = kSample, .num_samples = 32});
  const DistributedSampler sampler(32, 0, 1);
  DataLoader full(dataset, sampler, kCpu);
  DataLoader half(dataset, sampler, kCpu, {.image_dtype = ddp::ImageDtype::Bf16});
  const auto batch = half.next();
  REQUIRE(batch.data.scalar_type() == torch::kBFloat16);
  REQUIRE(torch::equal(batch.data, full.next().data.to(torch::kBFloat16)));
}
