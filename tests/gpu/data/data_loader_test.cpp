// SPDX-License-Identifier: Apache-2.0
// The loader's copies to a GPU: the CPU's bits, while the step and the copies overlap.
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/torch.h>

#include <chrono>
#include <iostream>
#include <thread>

#include "ddp/data/data_loader.hpp"
#include "ddp/data/tensor_dataset.hpp"
#include "models/tokens/token_dataset.hpp"
#include "ops/shared/timing_event.hpp"
#include "support/catch.hpp"

using ddp::DataLoader;
using ddp::DistributedSampler;

namespace {

struct NamedBatch {
  torch::Tensor images;
  std::vector<int64_t> indices;
};
void for_each_tensor(NamedBatch& batch, const ddp::TensorVisitor& visit) {
  visit(batch.images);
}

struct Ramp {
  int64_t size() const { return 100; }
  std::pair<int64_t, torch::Tensor> get(int64_t index) const {
    return {index, torch::full({257}, static_cast<float>(index))};
  }
};

NamedBatch collate(std::vector<std::pair<int64_t, torch::Tensor>> items) {
  NamedBatch batch;
  std::vector<torch::Tensor> images;
  for (auto& [index, image] : items) {
    batch.indices.push_back(index);
    images.push_back(image);
  }
  batch.images = torch::stack(images);
  return batch;
}

// Routes of image batches to a GPU.
struct Way {
  const char* name;
  ddp::Augment augment = ddp::Augment::PadCrop;
  ddp::CachePolicy cache = ddp::CachePolicy::Ram;
  ddp::DevicePolicy resident = ddp::DevicePolicy::Off;
};
const Way kCopied{"copied"};
const Way kMadeOfParts{"made of parts", ddp::Augment::RandomResizedCrop, ddp::CachePolicy::Off};
const Way kResident{"resident", ddp::Augment::PadCrop, ddp::CachePolicy::Ram,
                    ddp::DevicePolicy::On};

std::shared_ptr<ddp::Dataset> images_of(const Way& way) {
  return ddp::make_dataset({.path = DDP_SOURCE_DIR "/data/cifar10-sample",
                            .image_size = 64,
                            .num_samples = 640,
                            .augment = way.augment,
                            .cache = way.cache});
}

// Keeps the current stream busy for some milliseconds, like a step.
void spin() {
  auto a = torch::ones({2048, 2048}, torch::kCUDA);
  for (int i = 0; i < 10; ++i) {
    a = torch::mm(a, a).mul_(1e-4);
  }
}

}  // namespace

TEST_CASE("batches on the GPU have the bits of those on the CPU", "[loader]") {
  const bool pin = GENERATE(true, false);
  const bool channels_last = GENERATE(false, true);
  const auto stream = c10::cuda::getStreamFromPool();
  c10::cuda::CUDAStreamGuard guard(stream);
  auto dataset = ddp::make_dataset({.path = DDP_SOURCE_DIR "/data/cifar10-sample",
                                    .num_samples = 500,
                                    .channels_last = channels_last});
  DistributedSampler sampler(500, 0, 1);
  DataLoader cpu(dataset, sampler, at::kCPU, {.batch_size = 64});
  DataLoader gpu(dataset, sampler, at::Device(at::kCUDA, 0), {.batch_size = 64, .pin_memory = pin});
  std::vector<ddp::Batch> kept;
  torch::Tensor wrong = torch::zeros({}, torch::kCUDA);
  for (int i = 0; i < 60; ++i) {
    const auto expected = cpu.next();
    auto batch = gpu.next();
    REQUIRE(batch.data.is_cuda());
    REQUIRE(batch.data.strides() == expected.data.strides());
    spin();  // overlaps the copy of the next batch
    wrong +=
        (batch.data != expected.data.cuda()).sum() + (batch.target != expected.target.cuda()).sum();
    REQUIRE(gpu.epoch() == cpu.epoch());
    REQUIRE(gpu.position() == cpu.position());
  }
  REQUIRE(wrong.item<float>() == 0);
  // A resumed loader drops its staged batches.
  DataLoader resumed(dataset, sampler, at::Device(at::kCUDA, 0),
                     {.batch_size = 64, .pin_memory = pin});
  (void)resumed.next();
  resumed.load_state_dict(gpu.state_dict());
  REQUIRE(torch::equal(resumed.next().data, gpu.next().data));
}

// The steps' stream spins from before the copies begin until they have been read. The loader itself
// guarantees that a batch has arrived: before a third copy begins, the host waits for the first.
TEST_CASE("batches come to the GPU while the steps' stream is busy", "[loader]") {
  constexpr int64_t kSpin = 4'000'000'000;  // cycles: 2 s, against some milliseconds of work
  constexpr size_t kWarmUp = 8, kBeside = 6, kOnTheWay = 2;
  const Way way = GENERATE(kCopied, kMadeOfParts);
  CAPTURE(way.name);
  const auto steps = c10::cuda::getStreamFromPool();
  const auto idle = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(steps);
  const auto dataset = images_of(way);
  const DistributedSampler sampler(640, 0, 1);
  DataLoader cpu(dataset, sampler, at::kCPU, {.batch_size = 16});
  DataLoader gpu(dataset, sampler, at::Device(at::kCUDA, 0),
                 {.batch_size = 16, .device_resident = way.resident});
  std::vector<ddp::Batch> expected, batches;
  const auto has_come = [&](size_t i) {
    const c10::cuda::CUDAStreamGuard reading(idle);  // the only stream that .cpu() waits for
    return torch::equal(batches[i].data.cpu(), expected[i].data) &&
           torch::equal(batches[i].target.cpu(), expected[i].target);
  };
  // Loading kernels and allocating memory may wait for the whole device, so both happen here.
  for (size_t i = 0; i < kWarmUp; ++i) {
    expected.push_back(cpu.next());
    batches.push_back(gpu.next());
  }
  c10::cuda::device_synchronize();
  REQUIRE(has_come(kWarmUp - 1));
  expected.clear();
  batches.clear();
  c10::cuda::device_synchronize();  // lets the next batches reuse their memory
  for (size_t i = 0; i < kBeside; ++i) {
    expected.push_back(cpu.next());
  }

  at::cuda::CUDAEvent spun;
  at::cuda::sleep(kSpin);
  spun.record(steps);
  for (size_t i = 0; i < kBeside; ++i) {
    batches.push_back(gpu.next());  // kept, because freed memory would wait for the steps
  }
  for (size_t i = 1; i + kOnTheWay < kBeside; ++i) {  // the first may be from before the spin
    CAPTURE(i);
    CHECK(has_come(i));
  }
  CHECK_FALSE(spun.query());
  c10::cuda::device_synchronize();
}

TEST_CASE("a user's batch type goes to the GPU through for_each_tensor", "[loader]") {
  DataLoader loader(std::make_shared<Ramp>(), DistributedSampler(100, 0, 1),
                    at::Device(at::kCUDA, 0), {.batch_size = 10}, collate);
  for (int i = 0; i < 30; ++i) {
    auto batch = loader.next();
    REQUIRE(batch.images.is_cuda());
    const auto values = batch.images.select(1, 0).cpu();
    for (size_t k = 0; k < batch.indices.size(); ++k) {
      REQUIRE(values[static_cast<int64_t>(k)].item<float>() ==
              static_cast<float>(batch.indices[k]));
    }
  }
}

TEST_CASE("batches of tensors are page-locked before the copy", "[loader]") {
  const bool pin = GENERATE(true, false);
  const auto data = torch::arange(500 * 257, torch::kFloat).view({500, 257});
  const auto target = torch::arange(500);
  const auto dataset = std::make_shared<ddp::TensorDataset>(data, target);
  const DistributedSampler sampler(500, 0, 1, {.shuffle = false});
  DataLoader loader(dataset, sampler, at::Device(at::kCUDA, 0),
                    {.batch_size = 50, .pin_memory = pin});
  torch::Tensor wrong = torch::zeros({}, torch::kCUDA);
  for (int64_t i = 0; i < 40; ++i) {
    const ddp::Batch batch = loader.next();
    REQUIRE(batch.data.is_cuda());
    spin();  // overlaps the copy of the next batch
    const int64_t first = i % 10 * 50;
    wrong += (batch.data != data.narrow(0, first, 50).cuda()).sum() +
             (batch.target != target.narrow(0, first, 50).cuda()).sum();
  }
  REQUIRE(wrong.item<float>() == 0);

  std::vector<torch::Tensor> tensors{torch::ones({3, 4}).t(), torch::ones({1}).expand({5}),
                                     torch::Tensor()};
  ddp::detail::pin_tensors({&tensors[0], &tensors[1], &tensors[2]});
  CHECK(tensors[0].is_pinned());
  CHECK(tensors[0].strides() == at::IntArrayRef({1, 4}));
  CHECK_FALSE(tensors[1].is_pinned());  // its elements share memory
}

TEST_CASE("packed and padded token batches on the GPU have the bits of those on the CPU",
          "[loader]") {
  const auto stream = c10::cuda::getStreamFromPool();
  c10::cuda::CUDAStreamGuard guard(stream);
  models::TokenDataOptions options;
  options.path = DDP_SOURCE_DIR "/data/chat-sample";
  options.layout = GENERATE(models::TokenLayout::Pack, models::TokenLayout::Pad);
  auto dataset = std::make_shared<models::TokenDataset>(options, ddp::Split::Train);
  const DistributedSampler sampler(dataset->size(), 0, 1);
  const models::TokenCollate collate(*dataset);
  DataLoader cpu(dataset, sampler, at::kCPU, {.batch_size = 8}, collate);
  DataLoader gpu(dataset, sampler, at::kCUDA, {.batch_size = 8}, collate);
  for (int i = 0; i < 40; ++i) {
    const models::TokenBatch expected = cpu.next();
    const models::TokenBatch batch = gpu.next();
    spin();
    REQUIRE(batch.input_ids.is_cuda());
    CHECK(torch::equal(batch.input_ids.cpu(), expected.input_ids));
    CHECK(torch::equal(batch.labels.cpu(), expected.labels));
    REQUIRE(batch.document_offsets.defined() == expected.document_offsets.defined());
    if (expected.document_offsets.defined()) {
      CHECK(torch::equal(batch.document_offsets.cpu(), expected.document_offsets));
      CHECK(torch::equal(batch.position_ids.cpu(), expected.position_ids));
    }
    CHECK(batch.num_targets == expected.num_targets);
  }
}

TEST_CASE("a batch that the device had no memory for is not lost", "[loader]") {
  using c10::cuda::CUDACachingAllocator::emptyCache;
  using c10::cuda::CUDACachingAllocator::setMemoryFraction;
  const Way way = GENERATE(kCopied, kMadeOfParts);
  CAPTURE(way.name);
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  const auto dataset = images_of(way);
  const DistributedSampler sampler(640, 0, 1);
  // The allocator requests each block of 16 MB separately from the device.
  DataLoader cpu(dataset, sampler, at::kCPU, {.batch_size = 320});
  DataLoader gpu(dataset, sampler, at::Device(at::kCUDA, 0),
                 {.batch_size = 320, .device_resident = way.resident});
  int errors = 0;
  for (int i = 0; i < 24; ++i) {
    ddp::Batch batch;
    for (int attempt = 0; !batch.data.defined(); ++attempt) {
      REQUIRE(attempt < 4);
      REQUIRE(gpu.epoch() == cpu.epoch());
      REQUIRE(gpu.position() == cpu.position());
      emptyCache();
      setMemoryFraction(attempt == 0 ? 1e-6 : 1, 0);
      try {
        batch = gpu.next();
      } catch (const c10::OutOfMemoryError&) {  // now, or while the last call read ahead
        ++errors;
      }
      setMemoryFraction(1, 0);
    }
    const auto expected = cpu.next();
    REQUIRE(torch::equal(batch.data.cpu(), expected.data));
    REQUIRE(torch::equal(batch.target.cpu(), expected.target));
  }
  REQUIRE(errors >= 6);
}

TEST_CASE("a wait for a batch costs what the GPU was idle for", "[loader]") {
  struct Slow : Ramp {
    std::pair<int64_t, torch::Tensor> get(int64_t index) const {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      return Ramp::get(index);
    }
  };
  const at::Device device(at::kCUDA, 0);
  DataLoader loader(std::make_shared<Slow>(), DistributedSampler(100, 0, 1), device,
                    {.batch_size = 4, .num_workers = 1, .prefetch_batches = 1}, collate);
  const auto step = [&](bool is_busy) {
    const double before = loader.wait_ms();
    torch::cuda::synchronize();
    if (is_busy) {
      ddp::ops::detail::delay_device(device, 150);
    }
    (void)loader.next();  // a batch takes 40 ms
    return loader.wait_ms() - before;
  };
  for (int i = 0; i < 6; ++i) {
    step(false);  // what was read ahead
  }
  const double idle = step(false);
  CHECK(idle > 20);
  CHECK(idle < 100);
  CHECK(step(true) < 5);
}

TEST_CASE("batches go to a GPU that is not the current one", "[loader]") {
  if (c10::cuda::device_count() < 2) {
    std::cout << "SKIPPED: needs 2 GPUs\n";
    return;
  }
  const Way way = GENERATE(kCopied, kMadeOfParts, kResident);
  CAPTURE(way.name);
  const at::Device second(at::kCUDA, 1);
  const auto dataset = images_of(way);
  const DistributedSampler sampler(640, 0, 1);
  DataLoader cpu(dataset, sampler, at::kCPU, {.batch_size = 64});
  DataLoader gpu(dataset, sampler, second, {.batch_size = 64, .device_resident = way.resident});
  REQUIRE((gpu.device_images() != nullptr) == (way.resident == ddp::DevicePolicy::On));
  for (int i = 0; i < 25; ++i) {
    const auto batch = gpu.next();
    REQUIRE(c10::cuda::current_device() == 0);
    const auto expected = cpu.next();
    REQUIRE(batch.data.device() == second);
    REQUIRE(batch.target.device() == second);
    REQUIRE(torch::equal(batch.data.cpu(), expected.data));
    REQUIRE(torch::equal(batch.target.cpu(), expected.target));
  }
}
