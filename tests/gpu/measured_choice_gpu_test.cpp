// SPDX-License-Identifier: Apache-2.0
// Which of several calls is taken, by kernels of known length.
#include <ATen/cuda/Sleep.h>
#include <torch/torch.h>

#include <thread>
#include <vector>

#include "ops/measured_choice.hpp"
#include "support/catch.hpp"

using ddp::ops::detail::choose_fastest;

namespace {

const c10::Device kGpu(c10::kCUDA, 0);

/// Calls of so many cycles each; one of 0 does not run.
size_t choose(const std::vector<int64_t>& cycles, float same_time = 1.02F) {
  return choose_fastest(
      kGpu, cycles.size(),
      [&](size_t i) {
        TORCH_CHECK(cycles[i] != 0, "does not run");
        at::cuda::sleep(cycles[i]);
      },
      same_time);
}

}  // namespace

TEST_CASE("the fastest call is taken, or the first of those as good as it") {
  torch::zeros({1}, kGpu);  // the device is up
  const std::vector<int64_t> cycles = {0, 200000, 46000, 40000, 100000};
  CHECK(choose(cycles) == 3);
  CHECK(choose(cycles, 1.3F) == 2);
  CHECK(choose(cycles, 10) == 1);
}

TEST_CASE("where no call runs none is taken") {
  torch::zeros({1}, kGpu);
  CHECK(choose({0, 0}) == 2);
  CHECK(choose({}) == 0);
}

TEST_CASE("two threads that measure on one GPU do not disturb each other") {
  torch::zeros({1}, kGpu);
  const auto measure_often = [](size_t& wrong) {
    for (int turn = 0; turn < 20; ++turn) {
      try {
        wrong += choose({60000, 20000}) == 1 ? 0 : 1;
      } catch (const std::exception&) {
        ++wrong;
      }
    }
  };
  size_t wrong[2] = {};
  std::thread other(measure_often, std::ref(wrong[1]));
  measure_often(wrong[0]);
  other.join();
  CHECK(wrong[0] == 0);
  CHECK(wrong[1] == 0);
}
