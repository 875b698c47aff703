// SPDX-License-Identifier: Apache-2.0
// Squeeze and excitation by the kernels, compared with ATen in float64.
#include "ops/vision/channel_scale.hpp"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/torch.h>

#include "ddp/ops/language.hpp"
#include "gpu/language/lm_test.hpp"
#include "support/catch.hpp"

using ddp::ops::detail::channel_means;
using ddp::ops::detail::ChannelMeans;
using ddp::ops::detail::fits_channel_kernels;
using ddp::ops::detail::scale_channels;
using ddp::ops::detail::scale_samples;
using namespace lm_test;

namespace {

constexpr auto kChannelsLast = torch::MemoryFormat::ChannelsLast;
constexpr auto kDtypes = {torch::kFloat, torch::kBFloat16, torch::kHalf};

/// x and a scale, and gradients of both results. The numbers are not centred, so that means and
/// sums do not cancel.
struct Gate {
  torch::Tensor x, scale, grad, grad_means;

  Gate(torch::IntArrayRef shape, torch::Dtype dtype) {
    const auto draw = [&](torch::IntArrayRef sizes) {
      return (torch::randn(sizes, torch::kCUDA) + 0.5).to(dtype);
    };
    x = draw(shape).contiguous(kChannelsLast).requires_grad_();
    scale = draw({shape[0], shape[1], 1, 1}).requires_grad_();
    grad = draw(shape).contiguous(kChannelsLast);
    grad_means = draw({shape[0], shape[1], 1, 1});
  }
  Gate in_double() const {
    auto copy = *this;
    copy.x = reference_of(x), copy.scale = reference_of(scale);
    copy.grad = grad.to(torch::kDouble), copy.grad_means = grad_means.to(torch::kDouble);
    return copy;
  }
};

ChannelMeans by_kernels(const torch::Tensor& x) {
  auto made = channel_means(x);
  REQUIRE(made.scale_slot.defined());
  return made;
}

struct Wanted {
  bool means = true, product = true;  // results with a gradient
};

/// Means, product, and the gradients of x and scale (undefined if there are none).
std::vector<torch::Tensor> run(const Gate& gate, bool by_aten, const Wanted& wanted = {}) {
  const auto made = by_aten ? ChannelMeans{torch::adaptive_avg_pool2d(gate.x, {1, 1}), gate.x, {}}
                            : by_kernels(gate.x);
  const auto y = by_aten ? gate.x * gate.scale : scale_channels(made, gate.scale);
  std::vector<torch::Tensor> results, grads;
  if (wanted.means && made.means.requires_grad()) {
    results.push_back(made.means), grads.push_back(gate.grad_means);
  }
  if (wanted.product && y.requires_grad()) {
    results.push_back(y), grads.push_back(gate.grad);
  }
  if (!results.empty()) {
    torch::autograd::backward(results, grads);
  }
  return {made.means.detach(), y.detach(), gate.x.grad(), gate.scale.grad()};
}

void check_near(const std::vector<torch::Tensor>& ours, const std::vector<torch::Tensor>& exact,
                double tolerance) {
  for (size_t i = 0; i < exact.size(); ++i) {
    INFO("result " << i);
    REQUIRE(ours[i].defined() == exact[i].defined());
    if (exact[i].defined()) {
      CHECK(ours[i].sizes() == exact[i].sizes());
      CHECK(relative_error(ours[i], exact[i]) <= tolerance);
    }
  }
}

}  // namespace

TEST_CASE("squeeze and excitation by kernels gives what ATen gives", "[gpu]") {
  torch::manual_seed(3);
  const std::vector<std::vector<int64_t>> shapes = {
      {1, 8, 1, 1},    {1, 8, 113, 111}, {2, 32, 57, 55},  {5, 96, 13, 9},
      {3, 144, 7, 7},  {7, 240, 5, 3},   {2, 480, 14, 14}, {4, 672, 1, 7},
      {3, 1152, 7, 7}, {70000, 8, 1, 2}, {2, 2056, 3, 3}};
  for (const auto dtype : kDtypes) {
    for (const auto& shape : shapes) {
      CAPTURE(shape, dtype);
      const Gate gate(shape, dtype);
      const auto exact = run(gate.in_double(), /*by_aten=*/true);
      const auto ours = run(gate, /*by_aten=*/false);
      check_near(ours, exact, tolerance_of(dtype));
      CHECK(ours[1].is_contiguous(kChannelsLast));
      CHECK(ours[3].scalar_type() == dtype);
      CHECK(torch::equal(ours[1], gate.x * gate.scale));  // one rounding each
    }
  }
}

TEST_CASE("squeeze and excitation with some gradients only", "[gpu]") {
  torch::manual_seed(4);
  const bool learns_x = GENERATE(true, false), learns_scale = GENERATE(true, false);
  const Wanted wanted = GENERATE(Wanted{true, true}, Wanted{true, false}, Wanted{false, true});
  Gate gate({3, 40, 9, 7}, torch::kBFloat16);
  gate.x.requires_grad_(learns_x), gate.scale.requires_grad_(learns_scale);
  const auto exact = run(gate.in_double(), /*by_aten=*/true, wanted);
  check_near(run(gate, /*by_aten=*/false, wanted), exact, tolerance_of(torch::kBFloat16));
}

TEST_CASE("squeeze and excitation of a scale that is computed from the means", "[gpu]") {
  torch::manual_seed(5);
  const bool recomputed = GENERATE(false, true);
  const Gate gate({4, 24, 11, 5}, torch::kFloat), exact = gate.in_double();
  const auto ours = [](const std::vector<torch::Tensor>& in) {
    const auto made = by_kernels(in[0]);
    return scale_channels(made, torch::sigmoid(made.means * in[1]));
  };
  const std::vector<torch::Tensor> inputs = {gate.x, gate.scale};
  const auto y = recomputed ? ddp::ops::checkpoint(ours, inputs) : ours(inputs);
  const auto means = torch::adaptive_avg_pool2d(exact.x, {1, 1});
  const auto z = exact.x * torch::sigmoid(means * exact.scale);
  z.backward(exact.grad);
  SECTION("the backward runs once") {
    y.backward(gate.grad);
    check_near({y, gate.x.grad(), gate.scale.grad()}, {z, exact.x.grad(), exact.scale.grad()},
               1e-5);
  }
  SECTION("twice") {
    y.backward(gate.grad, /*retain_graph=*/true);
    y.backward(gate.grad);
    check_near({gate.x.grad(), gate.scale.grad()}, {2 * exact.x.grad(), 2 * exact.scale.grad()},
               1e-5);
  }
  SECTION("first for the scale alone") {
    if (recomputed) {
      return;  // checkpoint() refuses torch::autograd::grad
    }
    const auto other = torch::autograd::grad({y}, {gate.scale}, {gate.grad}, true)[0];
    const auto both = torch::autograd::grad({y}, inputs, {gate.grad});
    check_near({other, both[0], both[1]}, {exact.scale.grad(), exact.x.grad(), exact.scale.grad()},
               1e-5);
  }
  SECTION("with a gradient of other strides") {
    const auto grad = gate.grad.contiguous();
    y.backward(grad);
    check_near({gate.x.grad(), gate.scale.grad()}, {exact.x.grad(), exact.scale.grad()}, 1e-5);
  }
}

TEST_CASE("squeeze and excitation of scales that the kernels do not take", "[gpu]") {
  torch::manual_seed(6);
  Gate gate({4, 16, 6, 6}, torch::kBFloat16);
  SECTION("of another dtype") {
    gate.scale = gate.scale.detach().to(torch::kFloat).requires_grad_();
  }
  SECTION("of another shape") {
    gate.scale = gate.scale.detach()[0].clone().requires_grad_();
  }
  SECTION("not contiguous") {
    gate.scale = torch::randn({16, 4}, torch::kCUDA).to(torch::kBFloat16).t();
    gate.scale = gate.scale.unsqueeze(2).unsqueeze(3).requires_grad_();
  }
  gate.grad = gate.grad.to((gate.x.detach() * gate.scale.detach()).scalar_type());
  const auto exact = run(gate.in_double(), /*by_aten=*/true);
  const auto ours = run(gate, /*by_aten=*/false);
  CHECK(ours[1].scalar_type() == gate.grad.scalar_type());
  check_near(ours, exact, 2 * tolerance_of(torch::kBFloat16));
}

TEST_CASE("inputs that ATen pools and scales", "[gpu]") {
  const auto options = torch::TensorOptions(torch::kCUDA).dtype(torch::kBFloat16);
  const auto flat = torch::randn({2 * 8 * 9 + 1}, options);
  const auto misaligned = flat.narrow(0, 1, 144).view({2, 3, 3, 8}).permute({0, 3, 1, 2});
  for (const auto& x : {torch::randn({2, 8, 3, 3}, options), torch::randn({2, 12, 3, 3}, options),
                        torch::randn({0, 8, 3, 3}, options), misaligned,
                        torch::randn({2, 8, 3, 3}, options.dtype(torch::kDouble))}) {
    CAPTURE(x.sizes(), x.strides());
    CHECK(!fits_channel_kernels(x));
    const auto made = channel_means(x);
    const auto scale = torch::sigmoid(made.means);
    CHECK(torch::equal(made.means, torch::adaptive_avg_pool2d(x, {1, 1})));
    CHECK(torch::equal(scale_channels(made, scale), x * scale));
  }
}

TEST_CASE("squeeze and excitation repeats its bits, alone and in a CUDA graph", "[gpu]") {
  torch::manual_seed(7);
  Gate gate({16, 144, 14, 14}, torch::kBFloat16);
  const auto run_again = [&] {
    gate.x = gate.x.detach().requires_grad_(), gate.scale = gate.scale.detach().requires_grad_();
    return run(gate, /*by_aten=*/false);
  };
  const auto first = run_again(), second = run_again();
  at::cuda::CUDAGraph graph;
  std::vector<torch::Tensor> third;
  const auto stream = at::cuda::getStreamFromPool();
  c10::cuda::device_synchronize();
  {
    const c10::cuda::CUDAStreamGuard guard(stream);
    graph.capture_begin();
    third = run_again();
    graph.capture_end();
    graph.replay();
    stream.synchronize();
  }
  for (size_t i = 0; i < first.size(); ++i) {
    INFO("result " << i);
    CHECK(torch::equal(first[i], second[i]));
    CHECK(torch::equal(first[i], third[i]));
  }
}

TEST_CASE("squeeze and excitation refuses a changed input and a second derivative", "[gpu]") {
  const Gate gate({2, 8, 3, 3}, torch::kFloat);
  const auto x = gate.x * 1;
  const auto y = scale_channels(by_kernels(x), gate.scale);
  SECTION("changed") {
    const torch::NoGradGuard no_grad;
    x.mul_(2);
    CHECK_THROWS_WITH(y.backward(gate.grad), Catch::Contains("modified by an inplace operation"));
  }
  SECTION("differentiated again") {
    CHECK_THROWS_WITH(torch::autograd::grad({y}, {gate.x}, {gate.grad}, true, true),
                      Catch::Contains("cannot be differentiated again"));
  }
}

TEST_CASE("samples are scaled as by ATen", "[gpu]") {
  const auto dtype = GENERATE(from_range(kDtypes));
  for (const auto& shape : std::vector<std::vector<int64_t>>{
           {5, 16, 7, 9}, {1, 8, 1, 1}, {6, 49, 96}, {3, 8}, {300, 24, 5, 5}, {4, 3, 5, 7}}) {
    for (const bool channels_last : {false, true}) {
      CAPTURE(shape, dtype, channels_last);
      auto x = torch::randn(shape, torch::kCUDA).to(dtype);
      if (channels_last && shape.size() == 4) {
        x = x.contiguous(kChannelsLast);
      }
      std::vector<int64_t> sizes(shape.size(), 1);
      sizes[0] = shape[0];
      const auto scale = (torch::rand(sizes, torch::kCUDA) * 3).to(dtype);
      const auto run = [&](const auto& function) {
        const auto leaf = x.detach().clone().requires_grad_();
        const auto y = function(leaf);
        y.backward(torch::ones_like(y) * 0.3 * x);
        return std::vector<torch::Tensor>{y.detach(), leaf.grad()};
      };
      const auto ours = run([&](const auto& leaf) { return scale_samples(leaf, scale); });
      const auto theirs = run([&](const auto& leaf) { return leaf * scale; });
      CHECK(torch::equal(ours[0], theirs[0]));
      CHECK(torch::equal(ours[1], theirs[1]));
      CHECK(ours[0].strides() == theirs[0].strides());
    }
  }
}
