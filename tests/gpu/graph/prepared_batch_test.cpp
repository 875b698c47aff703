// SPDX-License-Identifier: Apache-2.0
// Batches of images in GPU memory that a step makes itself: the CPU's bits, eager and replayed.
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include "gpu/graph/graphed_step_test.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

std::shared_ptr<Dataset> images(int64_t num_samples) {
  return make_dataset({.path = DDP_SOURCE_DIR "/data/cifar10-sample",
                       .num_samples = num_samples,
                       .seed = 9,
                       .cutout = 8});
}

DistributedSampler sampler_of(const Dataset& dataset) {
  return DistributedSampler(dataset.size(), rank(), world(), {.seed = 2});
}

/// Records a step's view of its batches.
struct Seen {
  std::vector<at::Tensor> data;
  std::vector<at::Tensor> target;
  friend void for_each_tensor(Seen& seen, const TensorVisitor& visit) {
    for (size_t i = 0; i < seen.data.size(); ++i) {
      visit(seen.data[i]);
      visit(seen.target[i]);
    }
  }
};

using Prepared = std::vector<PreparedBatch>;

auto make_all(const DeviceImageLoader& loader) {
  return [&loader](const Prepared& batches, const StepScalars&) {
    Seen seen;
    for (const auto& prepared : batches) {
      auto batch = loader.make(prepared);
      seen.data.push_back(batch.data);
      seen.target.push_back(batch.target);
    }
    return seen;
  };
}

void require_same(const Seen& seen, size_t i, const Batch& expected) {
  REQUIRE(torch::equal(seen.data[i].cpu(), expected.data));
  REQUIRE(torch::equal(seen.target[i].cpu(), expected.target));
}

}  // namespace

TEST_CASE("batches that a step makes are the CPU's, over the ends of epochs") {
  const auto mode = GENERATE(CudaGraph::Off, CudaGraph::On);
  // 5 batches per epoch, the last one smaller, and two per step: steps cross the ends of epochs.
  const auto dataset = images(76 * world());
  const auto sampler = sampler_of(*dataset);
  const LoaderOptions options{.batch_size = 16, .image_dtype = ImageDtype::Bf16};
  DataLoader cpu(dataset, sampler, at::kCPU, options);
  DataLoader gpu(dataset, sampler, context().device(), options);
  REQUIRE(gpu.device_images() != nullptr);
  auto& loader = *gpu.device_images();
  GraphedStep step(context(), {}, make_all(loader), GraphedStepOptions{.mode = mode});
  constexpr int kRounds = 40;
  for (int i = 0; i < kRounds; ++i) {
    CAPTURE(i);
    if (i == 25) {  // resumes with another state, also where the order is reshuffled
      auto moved = cpu.state_dict();
      gpu.load_state_dict(moved);
      cpu.load_state_dict(moved);
    }
    if (i % 7 == 6) {  // an eager batch between steps
      REQUIRE(torch::equal(gpu.next().data.cpu(), cpu.next().data));
    }
    Prepared prepared;
    for (int micro = 0; micro < 2; ++micro) {
      prepared.push_back(loader.prepare());
    }
    const auto seen = step(prepared, {.step = i}).outputs;
    require_same(seen, 0, cpu.next());
    require_same(seen, 1, cpu.next());
    REQUIRE(gpu.epoch() == cpu.epoch());
    REQUIRE(gpu.position() == cpu.position());
  }
  if (mode == CudaGraph::On) {  // only whole batches, or the smaller one first or second
    REQUIRE(step.counts().captures == 3);
    REQUIRE(step.counts().replayed >= kRounds - 8);
  }
}

TEST_CASE("a step that cannot be captured has its batch all the same, once") {
  const auto dataset = images(64 * world());
  const auto sampler = sampler_of(*dataset);
  DataLoader cpu(dataset, sampler, at::kCPU, {.batch_size = 16});
  DataLoader gpu(dataset, sampler, context().device(), {.batch_size = 16});
  auto& loader = *gpu.device_images();
  const auto make = make_all(loader);
  GraphedStep step(
      context(), {},
      [&](const Prepared& batches, const StepScalars& scalars) {
        auto seen = make(batches, scalars);
        if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
          throw std::runtime_error("not in a capture");
        }
        return seen;
      },
      GraphedStepOptions{});
  for (int i = 0; i < 10; ++i) {
    require_same(step(Prepared{loader.prepare()}, {.step = i}).outputs, 0, cpu.next());
  }
  REQUIRE_THAT(step.counts().why_eager, Catch::Contains("not in a capture"));
}

TEST_CASE("a batch that was not prepared by the loader is refused") {
  const auto dataset = images(64 * world());
  DataLoader gpu(dataset, sampler_of(*dataset), context().device(), {.batch_size = 16});
  auto& loader = *gpu.device_images();
  auto prepared = loader.prepare();
  REQUIRE(loader.make(prepared).size() == 16);
  prepared.size = 17;
  REQUIRE_THROWS_AS(loader.make(prepared), SettingsError);
  REQUIRE_THROWS_AS(loader.make({}), SettingsError);
}
