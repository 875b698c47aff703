// SPDX-License-Identifier: Apache-2.0
// What a captured step keeps of the device's memory.
#include <c10/cuda/CUDACachingAllocator.h>

#include "gpu/graphed_step_test.hpp"

using namespace ddp;
using namespace ddp::test;

namespace {

/// MiB that the allocator holds when all that is not needed has gone back.
double held_mib() {
  torch::cuda::synchronize();
  c10::cuda::CUDACachingAllocator::emptyCache();
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(context().device().index());
  return static_cast<double>(stats.reserved_bytes[kAll].current) / (1 << 20);
}

}  // namespace

TEST_CASE("a graph keeps what its step has at a time, not one block for each size") {
  // As in a backward: fewer and larger tensors, when the smaller ones have gone.
  const std::vector<std::pair<int64_t, int64_t>> layers = {{16, 16}, {2, 96}, {1, 224}};  // MiB
  constexpr double kAtATime = 256, kAll = 672;
  const double before = held_mib();
  GraphedStep step(context(), {}, [&](const Batch& batch, const StepScalars&) {
    auto result = batch.data[0].clone();
    for (const auto& [count, mib] : layers) {
      std::vector<at::Tensor> made;
      for (int64_t i = 0; i < count; ++i) {
        made.push_back(torch::ones({mib << 20}, on_device().dtype(torch::kByte)));
      }
      result += made.back()[0];
    }
    return std::vector{result};
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
