// SPDX-License-Identifier: Apache-2.0
// Device memory that a captured step and its warm-up hold.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <algorithm>

#include "gpu/graph/graphed_step_test.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

/// MiB that the allocator holds after freeing its cache.
double held_mib() {
  torch::cuda::synchronize();
  c10::cuda::CUDACachingAllocator::emptyCache();
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(context().device().index());
  return static_cast<double>(stats.reserved_bytes[kAll].current) / (1 << 20);
}

/// The largest block in the allocator's cache for eager steps, in MiB.
double largest_free_mib() {
  size_t largest = 0;
  for (const auto& segment :
       c10::cuda::CUDACachingAllocator::snapshot({0, 0}, /*include_traces=*/false).segments) {
    const bool eager = segment.owner_private_pool_id == c10::cuda::MempoolId_t{0, 0};
    for (const auto& block : segment.blocks) {
      largest = eager && !block.active ? std::max(largest, block.size) : largest;
    }
  }
  return static_cast<double>(largest) / (1 << 20);
}

// As in a backward: fewer and larger tensors, after the smaller ones are freed.
const std::vector<std::pair<int64_t, int64_t>> kLayers = {{16, 16}, {2, 96}, {1, 224}};  // MiB
constexpr double kAtATime = 256, kLargest = 224, kAll = 672;

at::Tensor with_layers(const at::Tensor& start) {
  auto result = start.clone();
  for (const auto& [count, mib] : kLayers) {
    std::vector<at::Tensor> made;
    for (int64_t i = 0; i < count; ++i) {
      made.push_back(torch::ones({mib << 20}, on_device().dtype(torch::kByte)));
    }
    result += made.back()[0];
  }
  return result;
}

}  // namespace

TEST_CASE("a graph keeps what its step has at a time, not one block for each size") {
  const double before = held_mib();
  GraphedStep step(context(), {}, [&](const Batch& batch, const StepScalars&) {
    return std::vector{with_layers(batch.data[0])};
  });
  const auto data = torch::ones({4}, on_device());
  for (int64_t i = 0; i < 6; ++i) {
    const auto result = step({data, data}, {.step = i});
    CHECK(result.log[0] == 4);
  }
  REQUIRE(step.counts().replayed > 0);
  const double kept = held_mib() - before;
  CHECK(kept >= kAtATime);
  CHECK(kept < kAtATime + 0.5 * (kAll - kAtATime));
}

TEST_CASE("a warm-up takes its memory as one block, but not before the buckets lie for good") {
  const bool settles_late = GENERATE(false, true);
  CAPTURE(settles_late);
  DdpOptions options;
  options.static_graph = true;  // settles after two backwards
  Mlp module;
  DistributedDataParallel model(module, group(), options);
  std::vector<double> free;  // at the start of each eager step
  GraphedStep step(
      context(),
      {.models = settles_late ? std::vector<DataParallelModel*>{&model}
                              : std::vector<DataParallelModel*>{}},
      [&](const at::Tensor& batch, const StepScalars&) {
        if (c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None) {
          free.push_back(largest_free_mib());
        }
        auto result = with_layers(batch[0][0]);
        if (settles_late) {
          model.zero_grad();
          model.forward(batch).sum().backward();
        }
        return result;
      },
      GraphedStepOptions{.mode = CudaGraph::On});
  held_mib();  // frees the memory cached by earlier tests
  for (int i = 0; i < 6; ++i) {
    step(torch::ones({3, 4}, on_device()), {});
  }
  // Several ranks rebuild the buckets in the third step, which adds a step without a graph.
  const size_t num_eager = settles_late && world() > 1 ? 4 : 3;
  REQUIRE(free.size() == num_eager);
  REQUIRE(step.counts().replayed == static_cast<int64_t>(6 - num_eager));
  CHECK(free[0] < kLargest);
  if (settles_late) {
    CHECK(free[1] <= kLargest);  // blocks that the first step left in the cache
    CHECK(free[num_eager - 2] <= kLargest);
  } else {
    CHECK(free[1] > kLargest);
  }
  CHECK(free.back() > kLargest);
}
