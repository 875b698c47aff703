// SPDX-License-Identifier: Apache-2.0
// FLOPs by the dispatcher. The expected numbers are those of Python's FlopCounterMode.
#include "ops/shared/flop_counter.hpp"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <functional>
#include <optional>
#include <thread>

#include "ops/vision/convolution_algorithms.hpp"
#include "support/catch.hpp"

namespace {

using ddp::ops::detail::CountedOp;
using ddp::ops::detail::FlopCounter;

torch::Tensor weights(std::vector<int64_t> sizes) {
  return torch::randn(sizes, torch::requires_grad());
}

double flops_of(const std::function<void()>& work) {
  const FlopCounter counter;
  work();
  return counter.flops();
}

void run_mlp(bool has_backward, bool wants_input_gradient) {
  const auto x = torch::randn({5, 7}, torch::requires_grad(wants_input_gradient));
  const auto y = torch::linear(torch::relu(torch::linear(x, weights({11, 7}), weights({11}))),
                               weights({3, 11}));
  if (has_backward) {
    y.sum().backward();
  }
}

void run_conv(int64_t groups, bool wants_input_gradient) {
  const auto x = torch::randn({2, 4, 9, 8}, torch::requires_grad(wants_input_gradient));
  torch::conv2d(x, weights({6, 4 / groups, 3, 2}), weights({6}), {2, 1}, {1, 0}, {1, 2}, groups)
      .sum()
      .backward();
}

}  // namespace

TEST_CASE("products of a step count as in Python, with the gradients that are computed") {
  REQUIRE(flops_of([] { run_mlp(false, false); }) == 1100);
  REQUIRE(flops_of([] { run_mlp(true, false); }) == 2530);
  REQUIRE(flops_of([] { run_mlp(true, true); }) == 3300);
  REQUIRE(flops_of([] {
            const auto a = weights({4, 5, 6}), b = weights({4, 6, 7});
            torch::bmm(a, b).sum().backward();
            torch::baddbmm(weights({4, 5, 7}), a, b).sum().backward();
          }) == 10080);
}

TEST_CASE("convolutions count as in Python, grouped weight gradients without other groups") {
  REQUIRE(flops_of([] { run_conv(1, true); }) == 51840);
  REQUIRE(flops_of([] { run_conv(1, false); }) == 34560);
  REQUIRE(flops_of([] { run_conv(2, true); }) == 3 * 8640);  // Python: 34560
  REQUIRE(flops_of([] {
            torch::conv1d(torch::randn({2, 4, 9}), weights({5, 4, 3})).sum().backward();
          }) == 3360);
  REQUIRE(flops_of([] {
            const auto x = weights({2, 4, 9, 8});
            torch::conv_transpose2d(x, weights({4, 6, 3, 2}), {}, 2, 1).sum().backward();
          }) == 124416);
}

TEST_CASE("attention counts as in Python, and its kernels by Python's formula") {
  const auto attend = [](bool has_mask) {
    const auto q = weights({2, 3, 10, 8}), k = weights({2, 3, 12, 8}), v = weights({2, 3, 12, 8});
    const auto mask = has_mask ? std::optional(weights({10, 12})) : std::nullopt;
    torch::scaled_dot_product_attention(q, k, v, mask).sum().backward();
  };
  // A mask with a gradient has no kernel on the CPU: two products forward, four backward.
  REQUIRE(flops_of([&] { attend(true); }) == 69120);
  REQUIRE(flops_of([&] { attend(false); }) == 23040 + 57600);  // with the scores once more
}

TEST_CASE("an op of autocast counts once, with the dtype in which it computes") {
  const FlopCounter counter;
  REQUIRE(counter.dtype() == at::ScalarType::Undefined);
  const auto w = weights({11, 7});
  torch::mm(torch::randn({2, 2}), torch::randn({2, 2}));
  REQUIRE(counter.dtype() == at::kFloat);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::increment_nesting();
  const auto y = torch::linear(torch::randn({5, 7}), w);
  at::autocast::decrement_nesting();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  REQUIRE(y.scalar_type() == at::kBFloat16);
  y.sum().backward();
  REQUIRE(counter.flops() == 16 + 1540);
  REQUIRE(counter.dtype() == at::kBFloat16);
}

TEST_CASE("pauses, other threads and further counters count nothing") {
  FlopCounter counter;
  const FlopCounter other;
  const auto product = [] { torch::mm(torch::ones({2, 3}), torch::ones({3, 4})); };
  std::thread(product).join();
  REQUIRE(counter.flops() == 0);
  product();
  counter.set_paused(true);
  product();
  counter.set_paused(false);
  REQUIRE(counter.flops() == 48);
  REQUIRE(other.flops() == 0);
}

TEST_CASE("a counted op counts what it says instead of what it calls") {
  const FlopCounter counter;
  {
    const CountedOp op(100, at::kHalf);
    torch::mm(torch::ones({2, 3}), torch::ones({3, 4}));
    const CountedOp inner(1000, at::kHalf);
  }
  REQUIRE(counter.flops() == 100);
  torch::mm(torch::ones({2, 3}), torch::ones({3, 4}));
  REQUIRE(counter.flops() == 148);
  REQUIRE(counter.dtype() == at::kHalf);
}

TEST_CASE("a convolution as a product counts its formula, not the product") {
  const auto x = torch::randn({2, 8, 2, 2}, torch::requires_grad());
  const auto w = weights({4, 8, 3, 3});
  const double one_pass = 2.0 * 2 * 4 * (4 * 8 * 9);
  REQUIRE(flops_of([&] {
            ddp::ops::conv2d(x, w, 1, 1, ddp::ops::Conv2dAlgorithm::Product).sum().backward();
          }) == 3 * one_pass);
}
