// SPDX-License-Identifier: Apache-2.0
// A set of images in GPU memory gives the bits of the CPU's loader.
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>

#include "ddp/data/data_loader.hpp"
#include "support/catch.hpp"

using ddp::DataLoader;
using ddp::DistributedSampler;

namespace {

const at::Device kGpu(at::kCUDA, 0);

struct OwnStream {
  c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  c10::cuda::CUDAStreamGuard guard{stream};
};

std::shared_ptr<ddp::Dataset> sample(ddp::DataOptions options = {}) {
  options.path = DDP_SOURCE_DIR "/data/cifar10-sample";
  return ddp::make_dataset(options);
}

}  // namespace

TEST_CASE("batches of images in GPU memory have the bits of the CPU's", "[device_images]") {
  const OwnStream own;
  const bool channels_last = GENERATE(true, false);
  const auto augment = GENERATE(ddp::Augment::PadCrop, ddp::Augment::None);
  const auto dtype = GENERATE(ddp::ImageDtype::Fp32, ddp::ImageDtype::Bf16, ddp::ImageDtype::Fp16);
  const bool drop_last = GENERATE(false, true);
  const int64_t channels = GENERATE(3, 1);
  const auto dataset = sample({.channels = channels,
                               .num_samples = 500,
                               .seed = 9,
                               .augment = augment,
                               .cutout = 8,
                               .channels_last = channels_last});
  // 3 ranks share 47 samples, which do not divide 500: partial batches of several sizes.
  const DistributedSampler sampler(500, 1, 3, {.seed = 2});
  const ddp::LoaderOptions options{
      .global_batch_size = 47, .drop_last = drop_last, .image_dtype = dtype};
  DataLoader cpu(dataset, sampler, at::kCPU, options);
  DataLoader gpu(dataset, sampler, kGpu, options);
  REQUIRE(gpu.device_images() != nullptr);
  REQUIRE(gpu.num_batches() == cpu.num_batches());
  for (int64_t i = 0; i < 3 * cpu.num_batches() + 2; ++i) {
    REQUIRE(gpu.epoch() == cpu.epoch());
    REQUIRE(gpu.position() == cpu.position());
    const auto expected = cpu.next();
    const auto batch = gpu.next();
    REQUIRE(batch.data.strides() == expected.data.strides());
    REQUIRE(batch.data.scalar_type() == expected.data.scalar_type());
    REQUIRE(torch::equal(batch.data.cpu(), expected.data));
    REQUIRE(torch::equal(batch.target.cpu(), expected.target));
  }
  // Either kind of loader resumes from the other's state.
  REQUIRE((gpu.state_dict().values == cpu.state_dict().values));
  DataLoader resumed(dataset, sampler, kGpu, options);
  (void)resumed.next();
  resumed.load_state_dict(cpu.state_dict());
  cpu.load_state_dict(gpu.state_dict());
  for (int i = 0; i < 15; ++i) {
    REQUIRE(torch::equal(resumed.next().data.cpu(), cpu.next().data));
  }
  resumed.begin_epoch(7);
  cpu.begin_epoch(7);
  REQUIRE(torch::equal(resumed.next().data.cpu(), cpu.next().data));
}

TEST_CASE("images whose bytes are no multiple of 16 too", "[device_images]") {
  const OwnStream own;
  // 30 px, cropped from the 32 px samples: 2700 bytes.
  const auto dataset = sample({.image_size = 30, .num_samples = 64, .cutout = 5});
  const DistributedSampler sampler(64, 0, 1);
  DataLoader cpu(dataset, sampler, at::kCPU, {.batch_size = 16});
  DataLoader gpu(dataset, sampler, kGpu, {.batch_size = 16});
  REQUIRE(gpu.device_images() != nullptr);
  for (int i = 0; i < 8; ++i) {
    REQUIRE(torch::equal(gpu.next().data.cpu(), cpu.next().data));
  }
}

TEST_CASE("a batch that the device had no memory for is the next one", "[device_images]") {
  using c10::cuda::CUDACachingAllocator::emptyCache;
  using c10::cuda::CUDACachingAllocator::setMemoryFraction;
  const OwnStream own;
  const auto dataset = sample({.num_samples = 320});
  const DistributedSampler sampler(320, 0, 1);
  DataLoader cpu(dataset, sampler, at::kCPU, {.batch_size = 160});
  DataLoader gpu(dataset, sampler, kGpu, {.batch_size = 160});
  for (int i = 0; i < 9; ++i) {  // an epoch has two batches; also covers the first one
    emptyCache();
    setMemoryFraction(1e-6, kGpu.index());
    REQUIRE_THROWS_AS(gpu.next(), c10::OutOfMemoryError);
    setMemoryFraction(1, kGpu.index());
    REQUIRE(gpu.position() == cpu.position());
    const auto batch = gpu.next();
    const auto expected = cpu.next();
    REQUIRE(torch::equal(batch.data.cpu(), expected.data));
    REQUIRE(torch::equal(batch.target.cpu(), expected.target));
  }
}

TEST_CASE("one batch after another on other streams", "[device_images]") {
  const auto dataset = sample({.num_samples = 320});
  const DistributedSampler sampler(320, 0, 1);
  DataLoader cpu(dataset, sampler, at::kCPU, {.batch_size = 64});
  DataLoader gpu(dataset, sampler, kGpu, {.batch_size = 64});
  for (int i = 0; i < 20; ++i) {
    const OwnStream own;
    REQUIRE(torch::equal(gpu.next().data.cpu(), cpu.next().data));
  }
}

TEST_CASE("time of a batch from GPU memory", "[.][bench]") {
  const OwnStream own;
  const auto dataset = sample({.channels_last = true});
  const DistributedSampler sampler(dataset->size(), 0, 1);
  for (int64_t batch_size : {64, 128, 512}) {
    DataLoader loader(
        dataset, sampler, kGpu,
        {.batch_size = batch_size, .drop_last = true, .image_dtype = ddp::ImageDtype::Bf16});
    auto& images = *loader.device_images();
    auto prepared = images.prepare();
    prepared.place = prepared.place.to(kGpu);
    at::cuda::CUDAGraph graph;
    graph.capture_begin();
    for (int i = 0; i < 100; ++i) {
      (void)images.make(prepared);
    }
    graph.capture_end();
    graph.replay();
    own.stream.synchronize();
    using Clock = std::chrono::steady_clock;
    auto begin = Clock::now();
    for (int i = 0; i < 10; ++i) {
      graph.replay();
    }
    own.stream.synchronize();
    const double kernel = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
    loader.begin_epoch(0);
    (void)loader.next();
    begin = Clock::now();
    for (int i = 0; i < 1000; ++i) {
      (void)images.prepare();
    }
    const double prepare = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
    loader.begin_epoch(0);
    (void)loader.next();
    begin = Clock::now();
    for (int i = 0; i < 1000; ++i) {
      (void)loader.next();
    }
    const double host = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
    own.stream.synchronize();
    const double both = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
    std::printf(
        "batch %lld: kernel %.2f us in a graph, prepare() %.2f us of the host; next() %.2f us of "
        "the "
        "host, %.2f us in all\n",
        static_cast<long long>(batch_size), kernel / 1000, prepare / 1000, host / 1000,
        both / 1000);
  }
}
