// SPDX-License-Identifier: Apache-2.0
// Selection among several calls, by kernels of known length.
#include <ATen/cuda/Sleep.h>
#include <torch/torch.h>

#include <string>
#include <thread>
#include <vector>

#include "ops/shared/choice_book.hpp"
#include "support/catch.hpp"

using ddp::ops::detail::ChoiceBook;
using ddp::ops::detail::choose_fastest;

namespace {

const c10::Device kGpu(c10::kCUDA, 0);

/// Calls that take the given cycles; a call of 0 cannot run.
size_t choose(const std::vector<int64_t>& cycles, float same_time = 1.02F,
              const std::string& what = "") {
  return choose_fastest(
      what, kGpu, cycles.size(),
      [&](size_t i) {
        TORCH_CHECK(cycles[i] != 0, "does not run");
        at::cuda::sleep(cycles[i]);
      },
      same_time);
}

}  // namespace

TEST_CASE("the fastest call is taken, or the first of those as good as it") {
  torch::zeros({1}, kGpu);  // initialises the device
  const std::vector<int64_t> cycles = {0, 200000, 46000, 40000, 100000};
  CHECK(choose(cycles) == 3);
  CHECK(choose(cycles, 1.3F) == 2);
  CHECK(choose(cycles, 10) == 1);
}

TEST_CASE("what was chosen once is taken by name, where it still runs and is one of as many") {
  torch::zeros({1}, kGpu);
  auto& book = ChoiceBook::instance();
  CHECK(choose({100000, 20000, 100000}, 1.02F, "three calls") == 1);
  CHECK(book.find("three calls", 3) == 1);
  CHECK(choose({20000, 100000, 100000}, 1.02F, "three calls") == 1);  // not measured
  CHECK(choose({20000, 100000, 100000}) == 0);
  CHECK(choose({20000, 0, 100000}, 1.02F, "three calls") == 0);  // that call cannot run here
  CHECK(book.find("three calls", 3) == 0);
  CHECK(choose({100000, 20000}, 1.02F, "three calls") == 1);  // other proposals from the library
  book.adopt({{"three calls", {3, 2}}});
  CHECK(choose({20000, 100000, 100000}, 1.02F, "three calls") == 2);
  CHECK(choose({0, 0}, 1.02F, "no call") == 2);
  CHECK_FALSE(book.find("no call", 2).has_value());
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
