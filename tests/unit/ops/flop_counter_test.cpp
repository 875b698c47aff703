// SPDX-License-Identifier: Apache-2.0
// Model FLOPs of dispatched ops. The expected numbers are those of Python's FlopCounterMode, unless
// a test says otherwise.
#include "ops/shared/flop_counter.hpp"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <optional>
#include <thread>

#include "ddp/ops/language.hpp"
#include "ops/vision/convolution_algorithms.hpp"
#include "support/catch.hpp"

namespace {

using ddp::ops::detail::CountedOp;
using ddp::ops::detail::FlopCounter;
using ddp::ops::detail::FlopKind;
using ddp::ops::detail::note_uncounted_ops;
using ddp::ops::detail::UncountedOps;

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

TEST_CASE("attention counts the same with and without a kernel") {
  const auto attend = [](bool has_mask) {
    const auto q = weights({2, 3, 10, 8}), k = weights({2, 3, 12, 8}), v = weights({2, 3, 12, 8});
    const auto mask = has_mask ? std::optional(weights({10, 12})) : std::nullopt;
    torch::scaled_dot_product_attention(q, k, v, mask).sum().backward();
  };
  // A mask with a gradient has no kernel on the CPU: two products forward, four backward.
  REQUIRE(flops_of([&] { attend(true); }) == 69120);
  REQUIRE(flops_of([&] { attend(false); }) == 69120);  // Python: 80640, with the scores twice
}

TEST_CASE("kernels of attention count, dense or of packed documents") {
  // The CPU has none: the ops count before autograd finds that out.
  const auto flops_before_error = [](const std::function<void()>& work) {
    return flops_of([&] { REQUIRE_THROWS_AS(work(), c10::Error); });
  };
  const auto q = weights({2, 10, 3, 8}), k = weights({2, 12, 3, 8}), v = weights({2, 12, 3, 4});
  REQUIRE(flops_before_error([&] {
            at::_flash_attention_forward(q, k, v, {}, {}, 10, 12, 0, false, false);
          }) == 2.0 * 2 * 3 * 10 * 12 * (8 + 4));
  REQUIRE(flops_before_error([&] {
            at::_efficient_attention_forward(q, k, v, {}, {}, {}, {}, {}, 0, 0);
          }) == 2.0 * 2 * 3 * 10 * 12 * (8 + 4));
  const auto packed = weights({10, 3, 8});
  const auto ends = torch::tensor({0, 4, 10}, torch::kInt);
  REQUIRE(flops_before_error([&] {
            at::_flash_attention_forward(packed, packed, packed, ends, ends, 6, 6, 0, true, false);
          }) == 2.0 * (4 * 4 + 6 * 6) * 3 * (8 + 8));
  const auto batch = weights({1, 10, 3, 8});
  REQUIRE(flops_before_error([&] {
            at::_efficient_attention_forward(batch, batch, batch, {}, ends, ends, 6, 6, 0, 1);
          }) == 2.0 * (4 * 4 + 6 * 6) * 3 * (8 + 8));
}

TEST_CASE("what a checkpoint computes again does not count, also inside another checkpoint") {
  const auto w = weights({8, 8});
  const auto block = [&](const std::vector<torch::Tensor>& inputs) {
    return torch::mm(torch::relu(torch::mm(inputs[0], w)), w);
  };
  const auto checkpointed = [&](const std::vector<torch::Tensor>& inputs) {
    return ddp::ops::checkpoint(block, inputs);
  };
  const auto x = weights({4, 8});
  const double plain = 6 * 2.0 * 4 * 8 * 8;
  REQUIRE(flops_of([&] { block({x}).sum().backward(); }) == plain);
  REQUIRE(flops_of([&] { checkpointed({x}).sum().backward(); }) == plain);
  REQUIRE(flops_of([&] { ddp::ops::checkpoint(checkpointed, {x}).sum().backward(); }) == plain);
}

TEST_CASE("convolutions that TorchScript or a program calls below at::convolution count once") {
  const auto x = torch::randn({2, 4, 9, 8}), w = torch::randn({6, 4, 3, 2});
  const double flops = flops_of([&] { torch::conv2d(x, w, {}, {2, 1}, {1, 0}); });
  REQUIRE(flops == 2.0 * 2 * 5 * 7 * (6 * 4 * 3 * 2));
  REQUIRE(flops_of([&] {
            at::_convolution(x, w, {}, {2, 1}, {1, 0}, {1, 1}, false, {0, 0}, 1, false, false, true,
                             true);
          }) == flops);
  REQUIRE(flops_of([&] { at::_slow_conv2d_forward(x, w, {3, 2}, {}, {2, 1}, {1, 0}); }) == flops);
  const auto trained = weights({6, 4, 3, 2});
  REQUIRE(flops_of([&] {
            REQUIRE_THROWS_AS(
                at::cudnn_convolution(x, trained, {1, 0}, {2, 1}, {1, 1}, 1, false, false, true),
                c10::Error);
          }) == flops);
}

TEST_CASE("a recurrent layer's kernel makes the number unknown") {
  const FlopCounter counter;
  torch::nn::LSTM lstm(4, 3);
  std::get<0>(lstm->forward(torch::randn({2, 5, 4}))).sum().backward();
  REQUIRE(std::isnan(counter.flops()));
  torch::mm(torch::ones({2, 3}), torch::ones({3, 4}));
  REQUIRE(std::isnan(counter.flops()));
  REQUIRE(counter.dtype() == at::kFloat);
}

TEST_CASE("ops that no counter sees make the number unknown, and the dtype stays known") {
  note_uncounted_ops();  // without a counter nothing is remembered
  FlopCounter counter;
  torch::mm(torch::ones({2, 3}), torch::ones({3, 4}));
  CHECK(counter.flops() == 48);
  counter.set_paused(true);
  note_uncounted_ops();
  CHECK(counter.flops() == 48);
  counter.set_paused(false);
  note_uncounted_ops();
  CHECK(std::isnan(counter.flops()));
  CHECK(counter.dtype() == torch::kFloat);
}

TEST_CASE("convolutions of float32 count apart from products") {
  const FlopCounter counter;
  torch::mm(torch::ones({2, 3}), torch::ones({3, 4}));
  REQUIRE_FALSE(counter.are_float_convolutions());
  torch::conv1d(torch::randn({2, 4, 9}), torch::randn({5, 4, 3}));
  REQUIRE(counter.dtype() == at::kFloat);
  REQUIRE(counter.are_float_convolutions());
  { const CountedOp op(2000, at::kFloat); }
  REQUIRE_FALSE(counter.are_float_convolutions());
  { const CountedOp op(2000, at::kFloat, FlopKind::Convolution); }
  REQUIRE(counter.are_float_convolutions());
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
  std::thread([] { const CountedOp op(100, at::kHalf); }).join();
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
  {
    const UncountedOps uncounted;
    torch::mm(torch::ones({2, 3}), torch::ones({3, 4}));
    const CountedOp inner(1000, at::kHalf);
  }
  REQUIRE(counter.flops() == 148);
}

TEST_CASE("a convolution as a product counts its formula, not the product") {
  const auto x = torch::randn({2, 8, 2, 2}, torch::requires_grad());
  const auto w = weights({4, 8, 3, 3});
  const double one_pass = 2.0 * 2 * 4 * (4 * 8 * 9);
  REQUIRE(flops_of([&] {
            ddp::ops::conv2d(x, w, 1, 1, ddp::ops::Conv2dAlgorithm::Product).sum().backward();
          }) == 3 * one_pass);
}
