// SPDX-License-Identifier: Apache-2.0
// JPEG images finished on the GPU have the bits of the CPU's loader.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/torch.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>

#include "data/images/batch_builders.hpp"
#include "data/images/image_file.hpp"
#include "data/images/nvjpeg/nvjpeg.hpp"
#include "ddp/data/data_loader.hpp"
#include "ddp/train/graphed_step.hpp"
#include "support/catch.hpp"
#include "support/stderr_of.hpp"
#include "unit/data/data_test_support.hpp"
#include "unit/data/images/jpeg_writer.hpp"
#include "unit/data/sources/tar_writer.hpp"

using ddp::DataLoader;
using ddp::DistributedSampler;

namespace {

const at::Device kGpu(at::kCUDA, 0);

// Removes the segments of Huffman tables.
void remove_tables(std::string& bytes) {
  size_t at = 2;
  while (bytes[at + 1] != '\xda') {  // until the scan
    const auto length = static_cast<size_t>(static_cast<uint8_t>(bytes[at + 2])) * 256 +
                        static_cast<uint8_t>(bytes[at + 3]) + 2;
    if (bytes[at + 1] == '\xc4') {
      bytes.erase(at, length);
    } else {
      at += length;
    }
  }
}

// Fails if GPUs are required and a GPU model that has engines reports none.
bool has_engines() {
  static const std::string reason = [] {
    std::string why;
    return ddp::detail::NvJpeg::open(why) ? std::string() : why;
  }();
  if (reason.empty()) {
    return true;
  }
  const auto* chip = at::cuda::getCurrentDeviceProperties();
  const bool should = chip->minor == 0 && chip->major >= 8;  // A100, H100, B200, not A40 or L40
  if (std::getenv("DDP_REQUIRE_GPUS") != nullptr && should) {
    FAIL(reason);
  }
  WARN("not tested: " + reason);
  return false;
}

void write_shard(const data_test::TempFolder& folder, int num_images, int (*width)(int),
                 int (*height)(int), int damaged = -1, int without_tables = -1) {
  std::string tar;
  for (int i = 0; i < num_images; ++i) {
    const std::string key = std::to_string(1000 + i);
    std::string bytes = data_test::make_jpeg(
        width(i), height(i), i % 5 == 0 ? TJSAMP_GRAY : TJSAMP_420, static_cast<uint64_t>(i));
    if (i == damaged) {
      bytes.resize(bytes.size() / 2);
    }
    if (i == without_tables) {
      remove_tables(bytes);
    }
    tar += data_test::tar_entry(key + ".jpg", bytes);
    tar += data_test::tar_entry(key + ".cls", std::to_string(i % 7));
  }
  data_test::write_file(folder.path() / "train.tar", tar + data_test::tar_end());
}

// A WebP file of 37 x 21 pixels.
std::string golden_webp() {
  std::ifstream golden(DDP_SOURCE_DIR "/tests/golden/image_kinds_golden.csv");
  std::string line, bytes;
  while (std::getline(golden, line) && !line.starts_with("webp_lossy,")) {
  }
  const std::string hex = line.substr(line.find(",37,21,") + 7);
  for (size_t i = 0; i < hex.find(','); i += 2) {
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  return bytes;
}

// A second shard, with a PNG and (or another PNG) a WebP file.
void write_other_images(const data_test::TempFolder& folder) {
  const std::string png = data_test::read_file(DDP_SOURCE_DIR "/tests/golden/eval/png.JPEG");
  const bool webp = ddp::detail::kind_of_extension("webp") == ddp::detail::FileKind::Image;
  data_test::write_file(
      folder.path() / "train-other.tar",
      data_test::tar_entry("0.png", png) + data_test::tar_entry("0.cls", "1") +
          data_test::tar_entry(webp ? "1.webp" : "1.png", webp ? golden_webp() : png) +
          data_test::tar_entry("1.cls", "2") + data_test::tar_end());
}

}  // namespace

TEST_CASE("JPEG batches made on the GPU have the bits of the CPU's", "[jpeg]") {
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  // Written once: the images take longer than the rest of a case.
  static const auto folder = [] {
    auto written = std::make_unique<data_test::TempFolder>();
    write_shard(
        *written, 48, [](int i) { return 90 + i * 13; }, [](int i) { return 640 - i * 11; });
    write_other_images(*written);
    return written;
  }();
  const auto augment = GENERATE(ddp::Augment::RandomResizedCrop, ddp::Augment::None);
  const int64_t size = GENERATE(96, 33, 300);
  const bool channels_last = GENERATE(true, false);
  const auto dtype = GENERATE(ddp::ImageDtype::Bf16, ddp::ImageDtype::Fp32);
  const int64_t channels = GENERATE(3, 1);
  const auto dataset = ddp::make_dataset({.path = folder->path(),
                                          .image_size = size,
                                          .channels = channels,
                                          .seed = 4,
                                          .augment = augment,
                                          .cutout = 20,
                                          .channels_last = channels_last,
                                          .cache = ddp::CachePolicy::Off});
  const DistributedSampler sampler(50, 0, 1);
  DataLoader cpu(dataset, sampler, at::kCPU, {.batch_size = 20, .image_dtype = dtype});
  DataLoader gpu(
      dataset, sampler, kGpu,
      {.batch_size = 20, .device_transform = ddp::DevicePolicy::On, .image_dtype = dtype});
  for (int i = 0; i < 7; ++i) {
    const auto expected = cpu.next();
    const auto batch = gpu.next();
    REQUIRE(batch.data.size(1) == channels);
    REQUIRE(batch.data.is_cuda());
    REQUIRE(batch.data.strides() == expected.data.strides());
    REQUIRE(batch.data.scalar_type() == expected.data.scalar_type());
    REQUIRE(torch::equal(batch.data.cpu(), expected.data));
    REQUIRE(torch::equal(batch.target.cpu(), expected.target));
    REQUIRE(gpu.position() == cpu.position());
  }
}

// Compares pixels of the same images, crops and flips, in normalised units (a level of 256 is
// 0.017).
TEST_CASE("the GPU's JPEG engines give the CPU's pixels", "[jpeg][nvjpeg]") {
  if (!has_engines()) {
    return;
  }
  const auto [subsampling, largest, mean] =
      GENERATE(table<int, double, double>({{TJSAMP_444, 0.0, 0.0},
                                           {TJSAMP_GRAY, 0.0, 0.0},
                                           {TJSAMP_422, 1.5, 0.03},
                                           {TJSAMP_440, 1.5, 0.03},
                                           {TJSAMP_420, 1.5, 0.03}}));
  CAPTURE(subsampling);
  data_test::TempFolder folder;
  std::string tar;
  for (int i = 0; i < 40; ++i) {  // too small for decoding at 1/2
    const std::string key = std::to_string(1000 + i);
    tar += data_test::tar_entry(
        key + ".jpg", data_test::make_jpeg(90 + i * 9, 440 - i * 7, subsampling, uint64_t(i), 85,
                                           i % 8 == 5 ? TJFLAG_PROGRESSIVE : 0));
    tar += data_test::tar_entry(key + ".cls", std::to_string(i % 7));
  }
  data_test::write_file(folder.path() / "train.tar", tar + data_test::tar_end());
  const auto dataset = ddp::make_dataset({.path = folder.path(),
                                          .image_size = 224,
                                          .augment = ddp::Augment::RandomResizedCrop,
                                          .channels_last = true,
                                          .cache = ddp::CachePolicy::Off});
  const DistributedSampler sampler(40, 0, 1);
  DataLoader cpu(dataset, sampler, kGpu, {.batch_size = 16});
  DataLoader gpu(dataset, sampler, kGpu,
                 {.batch_size = 16, .jpeg_decoder = ddp::JpegDecoder::NvJpeg});
  for (int i = 0; i < 9; ++i) {
    const auto expected = cpu.next();
    const auto batch = gpu.next();
    REQUIRE(torch::equal(batch.target, expected.target));
    const auto difference = (batch.data - expected.data).abs();
    CHECK(difference.max().item<double>() <= largest);
    CHECK(difference.mean().item<double>() <= mean);
  }
}

TEST_CASE("large images have the CPU's pixels where the GPU's engines decode the others",
          "[jpeg][nvjpeg]") {
  if (!has_engines()) {
    return;
  }
  data_test::TempFolder folder;
  write_shard(
      folder, 12, [](int i) { return i % 2 == 0 ? 100 : 801 + i; }, [](int i) { return 420 - i; });
  const auto dataset = ddp::make_dataset({.path = folder.path(),
                                          .image_size = 64,
                                          .augment = ddp::Augment::RandomResizedCrop,
                                          .random_resized_crop = {.min_scale = 0.9},
                                          .cache = ddp::CachePolicy::Off});
  const DistributedSampler sampler(12, 0, 1, {.shuffle = false});
  DataLoader cpu(dataset, sampler, kGpu, {.batch_size = 12});
  DataLoader gpu(dataset, sampler, kGpu,
                 {.batch_size = 12, .jpeg_decoder = ddp::JpegDecoder::NvJpeg});
  for (int epoch = 0; epoch < 3; ++epoch) {
    const auto expected = cpu.next();
    const auto batch = gpu.next();
    for (int64_t i = 0; i < 12; ++i) {
      CAPTURE(epoch, i);  // 0 and 10 are grey images
      const bool same = torch::equal(batch.data[i], expected.data[i]);
      CHECK(same == (i % 2 == 1 || i % 5 == 0));
    }
  }
}

TEST_CASE("an image that nvJPEG refuses changes no other", "[jpeg][nvjpeg]") {
  if (!has_engines()) {
    return;
  }
  data_test::TempFolder good_folder, folder;
  const auto size = [](int i) { return 130 + i * 3; };
  write_shard(good_folder, 16, size, size);
  // No Huffman tables: libjpeg-turbo uses the standard's.
  write_shard(folder, 16, size, size, -1, 6);
  const DistributedSampler sampler(16, 0, 1, {.shuffle = false});
  const auto loader_of = [&](const data_test::TempFolder& of, ddp::JpegDecoder decoder) {
    const auto dataset = ddp::make_dataset({.path = of.path(),
                                            .image_size = 96,
                                            .augment = ddp::Augment::RandomResizedCrop,
                                            .cache = ddp::CachePolicy::Off});
    return DataLoader(dataset, sampler, kGpu, {.batch_size = 16, .jpeg_decoder = decoder});
  };
  auto good = loader_of(good_folder, ddp::JpegDecoder::NvJpeg);
  auto cpu = loader_of(good_folder, ddp::JpegDecoder::Cpu);
  auto gpu = loader_of(folder, ddp::JpegDecoder::NvJpeg);
  for (int epoch = 0; epoch < 8; ++epoch) {  // later epochs do not use nvJPEG
    const auto expected = good.next();
    const auto on_cpu = cpu.next();
    const auto batch = gpu.next();
    REQUIRE_FALSE(torch::equal(expected.data, on_cpu.data));  // 4:2:0 colours differ
    for (int64_t i = 0; i < 16; ++i) {
      CAPTURE(epoch, i);
      CHECK(torch::equal(batch.data[i], i == 6 ? on_cpu.data[i] : expected.data[i]));
    }
  }
}

TEST_CASE("without memory for what nvJPEG decodes the CPU decodes", "[jpeg][nvjpeg]") {
  if (!has_engines()) {
    return;
  }
  data_test::TempFolder folder;
  write_shard(
      folder, 16, [](int i) { return 130 + i; }, [](int) { return 150; });
  const std::shared_ptr<const ddp::Dataset> dataset =
      ddp::make_dataset({.path = folder.path(),
                         .image_size = 96,
                         .augment = ddp::Augment::RandomResizedCrop,
                         .cache = ddp::CachePolicy::Off});
  const auto batch_of = [&](ddp::JpegDecoder decoder, bool memory) {
    const auto builder = ddp::detail::make_device_builder(
        dataset, kGpu, {.batch_size = 16, .jpeg_decoder = decoder}, 1, 16);
    ddp::Batch batch;
    for (int round = 0; round < 2; ++round) {
      builder->resize(0, 16);
      for (int64_t i = 0; i < 16; ++i) {
        builder->fill(0, i, i, 0);
      }
      c10::cuda::CUDACachingAllocator::emptyCache();
      c10::cuda::CUDACachingAllocator::setMemoryFraction(memory || round == 1 ? 1.0 : 1e-9, 0);
      builder->finish(0);
      c10::cuda::CUDACachingAllocator::setMemoryFraction(1.0, 0);
      batch = builder->take(0);
    }
    return batch;
  };
  const auto expected = batch_of(ddp::JpegDecoder::Cpu, true);
  REQUIRE_FALSE(torch::equal(batch_of(ddp::JpegDecoder::NvJpeg, true).data, expected.data));
  ddp::Batch batch;
  const auto told = testing::stderr_of([&] { batch = batch_of(ddp::JpegDecoder::NvJpeg, false); });
  CHECK(testing::num_found(told, "nvjpeg is not used: the GPU has no memory left") == 1);
  REQUIRE(torch::equal(batch.data, expected.data));
  REQUIRE(torch::equal(batch.target, expected.target));
}

TEST_CASE("the GPU's engines beside replayed steps give the same pixels", "[jpeg][nvjpeg]") {
  if (!has_engines()) {
    return;
  }
  data_test::TempFolder folder;
  write_shard(
      folder, 64, [](int i) { return 200 + i; }, [](int i) { return 330 - i; });
  const auto dataset = ddp::make_dataset({.path = folder.path(),
                                          .image_size = 160,
                                          .augment = ddp::Augment::RandomResizedCrop,
                                          .cache = ddp::CachePolicy::Off});
  const DistributedSampler sampler(64, 0, 1);
  auto context = ddp::Context::create({});
  const auto a = torch::randn({2048, 2048}, kGpu);
  ddp::GraphedStep step(
      context, {},
      [&](const ddp::Batch& batch, const ddp::StepScalars&) {
        for (int i = 0; i < 20; ++i) {
          (void)torch::mm(a, a);
        }
        return std::vector{batch.data.to(torch::kFloat64).sum()};
      },
      ddp::GraphedStepOptions{.mode = ddp::CudaGraph::On});
  const auto sums = [&](bool steps) {
    DataLoader loader(dataset, sampler, kGpu,
                      {.batch_size = 16, .jpeg_decoder = ddp::JpegDecoder::NvJpeg});
    std::vector<double> found;
    for (int64_t i = 0; i < 40; ++i) {
      const auto batch = loader.next();
      found.push_back(steps ? step(batch, {.step = i}).log[0]
                            : batch.data.to(torch::kFloat64).sum().item<double>());
    }
    return found;
  };
  const auto alone = sums(false);
  const auto beside = sums(true);
  REQUIRE(step.counts().replayed > 30);
  for (size_t i = 0; i < alone.size(); ++i) {
    CAPTURE(i);
    CHECK(beside[i] == Approx(alone[i]).epsilon(1e-6));  // the log is float32
  }
  context.close();
}

TEST_CASE("parts larger than a batch's block has room for", "[jpeg]") {
  data_test::TempFolder folder;
  // Whole images of 252 px decode at 1/4 to 63 px, nearly four times the output's pixels.
  write_shard(
      folder, 24, [](int) { return 252; }, [](int) { return 252; });
  const auto dataset = ddp::make_dataset(
      {.path = folder.path(),
       .image_size = 32,
       .augment = ddp::Augment::RandomResizedCrop,
       .random_resized_crop = {.min_scale = 0.999, .min_ratio = 0.999, .max_ratio = 1.001},
       .cache = ddp::CachePolicy::Off});
  const DistributedSampler sampler(24, 0, 1);
  DataLoader cpu(dataset, sampler, at::kCPU, {.batch_size = 12});
  DataLoader gpu(dataset, sampler, kGpu, {.batch_size = 12});
  for (int i = 0; i < 6; ++i) {
    REQUIRE(torch::equal(gpu.next().data.cpu(), cpu.next().data));
  }
}

TEST_CASE("a corrupt image is an error with its place, or skipped and counted", "[jpeg]") {
  data_test::TempFolder folder;
  write_shard(
      folder, 16, [](int i) { return 120 + i; }, [](int) { return 130; }, 5);
  ddp::DataOptions options{.path = folder.path(),
                           .image_size = 64,
                           .augment = ddp::Augment::RandomResizedCrop,
                           .cache = ddp::CachePolicy::Off};
  const auto decoder = GENERATE(ddp::JpegDecoder::Cpu, ddp::JpegDecoder::NvJpeg);
  const ddp::LoaderOptions loading{.batch_size = 16, .jpeg_decoder = decoder};
  const DistributedSampler sampler(16, 0, 1, {.shuffle = false});
  {
    DataLoader gpu(ddp::make_dataset(options), sampler, kGpu, loading);
    const std::string message = data_test::message_of<ddp::DataError>([&] { (void)gpu.next(); });
    CAPTURE(message);
    REQUIRE(data_test::contains(message, "train.tar at offset"));
    REQUIRE(data_test::contains(message, "loading sample 5 of epoch 0"));
  }
  options.corrupt = ddp::CorruptPolicy::Skip;
  options.max_corrupt_fraction = 0.1;
  const auto dataset = ddp::make_dataset(options);
  DataLoader cpu(dataset, sampler, at::kCPU, {.batch_size = 16});
  DataLoader gpu(dataset, sampler, kGpu, loading);
  const auto batch = gpu.next();
  const auto expected = cpu.next();
  REQUIRE(batch.target[5].item<int64_t>() == 6 % 7);  // of the next good image
  const bool same = torch::equal(batch.data.cpu(), expected.data);
  REQUIRE((same || decoder == ddp::JpegDecoder::NvJpeg));  // 4:2:0 colours differ
  REQUIRE((batch.data.cpu() - expected.data).abs().mean().item<double>() < 0.05);
  REQUIRE(dataset->num_skipped() == 1);
}

TEST_CASE("a corrupt image in a captured run is skipped as in an eager one, or ends it") {
  auto context = ddp::Context::create({});
  data_test::TempFolder folder;
  write_shard(
      folder, 96, [](int i) { return 120 + i; }, [](int) { return 130; }, 77);
  ddp::DataOptions options{.path = folder.path(),
                           .image_size = 64,
                           .augment = ddp::Augment::RandomResizedCrop,
                           .corrupt = ddp::CorruptPolicy::Skip,
                           .max_corrupt_fraction = 0.02,
                           .cache = ddp::CachePolicy::Off};
  const DistributedSampler sampler(96, 0, 1, {.shuffle = false});
  auto sum = torch::zeros({}, torch::dtype(torch::kFloat64).device(kGpu));
  const auto add = [&](const ddp::Batch& batch, const ddp::StepScalars&) {
    sum.add_(batch.data.to(torch::kFloat64).sum()).mul_(1.25).add_(batch.target.sum());
    return std::vector{sum};
  };
  const auto train = [&](ddp::CudaGraph mode) {
    sum.zero_();
    const auto dataset = ddp::make_dataset(options);
    DataLoader loader(dataset, sampler, kGpu, {.batch_size = 8});
    ddp::GraphedStep step(context, {}, add, ddp::GraphedStepOptions{.mode = mode});
    std::vector<double> log;
    for (int64_t i = 0; i < 30; ++i) {
      log.push_back(step(loader.next(), {.step = i}).log[0]);
    }
    REQUIRE(dataset->num_skipped() == 1);
    REQUIRE((step.counts().replayed > 20) == (mode == ddp::CudaGraph::On));
    return log;
  };
  REQUIRE(train(ddp::CudaGraph::On) == train(ddp::CudaGraph::Off));

  options.corrupt = ddp::CorruptPolicy::Error;
  DataLoader loader(ddp::make_dataset(options), sampler, kGpu, {.batch_size = 8});
  ddp::GraphedStep step(context, {}, add, ddp::GraphedStepOptions{.mode = ddp::CudaGraph::On});
  ddp::Batch last;
  int64_t num_steps = 0;
  const std::string message = data_test::message_of<ddp::DataError>([&] {
    for (; num_steps < 30; ++num_steps) {
      last = loader.next();
      (void)step(last, {.step = num_steps});
    }
  });
  CAPTURE(message);
  REQUIRE(data_test::contains(message, "loading sample 77 of epoch 0"));
  REQUIRE(num_steps == 9);  // the earlier steps ran
  REQUIRE(step.counts().replayed > 0);
  const double before = sum.item<double>();
  REQUIRE(step(last, {.step = num_steps}).log[0] != before);  // the graph still works
  context.close();
}
