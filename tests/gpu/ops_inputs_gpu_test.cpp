// SPDX-License-Identifier: Apache-2.0
// Inputs that the ops' kernels must not take as they come: on other devices, empty, misaligned,
// frozen, not finite.
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/torch.h>

#include <limits>

#include "batch_norm_gpu_test.hpp"
#include "ddp/ops/conv2d.hpp"
#include "ddp/ops/cross_entropy.hpp"
#include "ddp/ops/grad_slot.hpp"
#include "ddp/ops/pooled_linear.hpp"
#include "ddp/ops/stem_convolution.hpp"
#include "lm_gpu_test.hpp"
#include "ops/batch_norm_fused.hpp"
#include "support/catch.hpp"

using namespace batch_norm_test;
using Catch::Contains;
using ddp::ops::Conv2dAlgorithm;
using ddp::ops::StemAlgorithm;
using lm_test::relative_error;
using torch::autograd::grad;

namespace {

constexpr auto kLast = torch::MemoryFormat::ChannelsLast;
const auto kHalves = torch::TensorOptions(torch::kCUDA).dtype(torch::kBFloat16);
// ATen's ops round between them, which turns the ReLU of values near zero: some per cent of a sum.
constexpr double kByAten = 0.05;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

torch::Tensor image(torch::IntArrayRef shape, torch::TensorOptions options = kHalves) {
  return torch::randn(shape, options).contiguous(kLast).requires_grad_(true);
}

/// The numbers of `tensor` one element behind a multiple of 16 bytes.
torch::Tensor misaligned(const torch::Tensor& tensor) {
  const auto flat =
      torch::empty({tensor.numel() + 1}, tensor.options()).narrow(0, 1, tensor.numel());
  auto view = flat.as_strided(tensor.sizes(), tensor.strides());
  view.copy_(tensor.detach());
  return view;
}

struct Slot {
  torch::Tensor parameter;
  ddp::ops::GradSlot slot;
  explicit Slot(const torch::Tensor& of)
      : parameter(of), slot{torch::full_like(of.detach(), 7, torch::kFloat)} {
    ddp::ops::set_grad_slot(parameter, &slot);
  }
  ~Slot() { ddp::ops::set_grad_slot(parameter, nullptr); }
  bool untouched() const { return !slot.written && slot.memory.eq(7).all().item<bool>(); }
};

}  // namespace

TEST_CASE("weights and labels on the CPU are refused, and the device lives on") {
  const auto x = image({4, 64, 8, 8}), small = image({4, 3, 32, 32});
  const auto cpu = torch::TensorOptions().dtype(torch::kBFloat16);
  CHECK_THROWS_WITH(ddp::ops::conv2d(x, torch::zeros({64, 64, 1, 1}, cpu), 1, 0),
                    Contains("conv2d: weight is on cpu"));
  CHECK_THROWS_WITH(ddp::ops::stem_convolution(small, torch::zeros({64, 3, 7, 7}, cpu)),
                    Contains("stem_convolution: weight is on cpu"));
  CHECK_THROWS_WITH(
      ddp::ops::pooled_linear(x, torch::zeros({10, 64}, kHalves), torch::zeros({10}, cpu)),
      Contains("pooled_linear: bias is on cpu"));
  CHECK_THROWS_WITH(
      ddp::ops::cross_entropy(torch::zeros({4, 10}, kHalves), torch::zeros({4}, torch::kLong)),
      Contains("cross_entropy: labels is on cpu"));
  CHECK((x + 1).sum().isfinite().item<bool>());
}

TEST_CASE("convolutions of an empty batch give an empty result and a zero gradient") {
  const auto check = [](const torch::Tensor& out, const torch::Tensor& x, const torch::Tensor& w) {
    CHECK(out.numel() == 0);
    const auto grads = grad({out.sum()}, {w});
    CHECK(grads[0].eq(0).all().item<bool>());
    CHECK(x.size(0) == 0);
  };
  for (const auto& [kernel, stride, side] :
       {std::tuple{1, 1, 7}, {1, 2, 2}, {3, 1, 1}, {3, 1, 2}, {3, 2, 2}, {3, 1, 8}}) {
    for (const auto algorithm : {Conv2dAlgorithm::Auto, Conv2dAlgorithm::Product}) {
      if (algorithm == Conv2dAlgorithm::Product && side == 8) {
        continue;
      }
      CAPTURE(kernel, stride, side, static_cast<int>(algorithm));
      const auto x = torch::empty({0, 64, side, side}, kHalves);
      const auto w = image({64, 64, kernel, kernel});
      check(ddp::ops::conv2d(x, w, stride, kernel / 2, algorithm), x, w);
    }
  }
  for (const int64_t side : {32, 224}) {
    const auto x = torch::empty({0, 3, side, side}, kHalves), w = image({64, 3, 7, 7});
    check(ddp::ops::stem_convolution(x, w), x, w);
  }
}

TEST_CASE("batch norm and pooled_linear take views at any address") {
  torch::manual_seed(3);
  for (const bool odd_x : {true, false}) {
    for (const auto& [name, form] : forms()) {
      INFO(name << (odd_x ? ", activations" : ", vectors"));
      auto inputs = make_inputs({4, 64, 8, 8}, torch::kCUDA, torch::kHalf);
      auto reference = converted(inputs, torch::kDouble);
      if (odd_x) {
        inputs.x = misaligned(inputs.x), inputs.grad = misaligned(inputs.grad);
        inputs.z = misaligned(inputs.z);
      } else {
        inputs.bn.weight = misaligned(inputs.bn.weight);
        inputs.bn.running_var = misaligned(inputs.bn.running_var);
      }
      const auto results = run(inputs, form), expected = run(reference, form);
      for (size_t i = 0; i < results.size(); ++i) {
        INFO(results[i].first);
        CHECK(relative_error(results[i].second, expected[i].second) < kByAten);
      }
    }
  }
  // A gradient that is a view at an odd address, where the kernels made the forward.
  auto inputs = make_inputs({4, 64, 8, 8}, torch::kCUDA, torch::kHalf);
  auto reference = converted(inputs, torch::kDouble);
  inputs.x.requires_grad_(true), reference.x.requires_grad_(true);
  const auto got = grad({ddp::ops::batch_norm_relu(inputs.x, inputs.bn)}, {inputs.x},
                        {misaligned(inputs.grad)})[0];
  const auto wanted = grad({ddp::ops::batch_norm_relu(reference.x, reference.bn)}, {reference.x},
                           {reference.grad})[0];
  CHECK(relative_error(got, wanted) < kByAten);
  const auto x = misaligned(image({4, 64, 2, 2})), w = image({10, 64, 1, 1}).view({10, 64}),
             b = torch::randn({10}, kHalves);
  CHECK(relative_error(ddp::ops::pooled_linear(x, w, b),
                       torch::linear(x.to(torch::kDouble).mean({2, 3}), w.to(torch::kDouble),
                                     b.to(torch::kDouble))) < 0.01);
}

TEST_CASE("a frozen parameter's slot stays unwritten") {
  for (const auto& [name, form] : forms()) {
    INFO(name);
    auto inputs = make_inputs({4, 64, 8, 8}, torch::kCUDA, torch::kBFloat16);
    const Slot weight(inputs.bn.weight), bias(inputs.bn.bias), weight_z(inputs.bn_z.weight),
        bias_z(inputs.bn_z.bias);
    REQUIRE(ddp::ops::detail::fits_kernels(inputs.x, inputs.bn));
    inputs.x.requires_grad_(true);
    const auto y = call(inputs, form).branch;
    y.to(torch::kFloat).square().sum().backward();
    CHECK(inputs.x.grad().abs().max().item<float>() > 0);
    for (const auto* slot : {&weight, &bias, &weight_z, &bias_z}) {
      CHECK(slot->untouched());
    }
    inputs.bn.bias.requires_grad_(true);
    call(inputs, form).branch.to(torch::kFloat).square().sum().backward();
    CHECK(weight.untouched());
    CHECK(bias.slot.written);
    CHECK(weight_z.untouched());
  }
  for (const int64_t classes : {10, 100}) {
    const auto x = image({8, 64, 2, 2});
    auto w = torch::randn({classes, 64}, kHalves), b = torch::randn({classes}, kHalves);
    const Slot weight(w), bias(b);
    ddp::ops::pooled_linear(x, w, b).sum().backward();
    CHECK(weight.untouched());
    CHECK(bias.untouched());
    b.requires_grad_(true);
    ddp::ops::pooled_linear(x, w, b).sum().backward();
    CHECK(weight.untouched());
    CHECK(bias.slot.memory.eq(8).all().item<bool>());
  }
}

TEST_CASE("a row without a largest finite logit is never right, in each kernel") {
  for (const int64_t classes : {3, 40}) {
    auto logits = torch::full({6, classes}, -1.0, torch::kCUDA);
    logits[0].fill_(kNan);
    logits[1].fill_(-kInf);
    logits[2][0] = kNan;
    logits[3][0] = 3;
    logits[4][0] = -kInf;
    logits[5][0] = kInf;
    logits.select(1, 2).narrow(0, 2, 1).fill_(2);
    logits.select(1, 2).narrow(0, 4, 1).fill_(2);
    for (int64_t label = 0; label < 3; ++label) {
      CAPTURE(classes, label);
      const auto labels = torch::full({6}, label, torch::kLong);
      const auto right = ddp::ops::cross_entropy(logits, labels.to(torch::kCUDA)).num_correct;
      CHECK(right.item<int64_t>() ==
            ddp::ops::cross_entropy(logits.cpu(), labels).num_correct.item<int64_t>());
      CHECK(right.item<int64_t>() == (label == 1 ? 0 : 1));
    }
  }
}

TEST_CASE("a label that is no class makes its row's gradient NaN, and no other's") {
  for (const int64_t classes : {10, 100}) {
    const auto logits = torch::randn({4, classes}, torch::kCUDA).requires_grad_(true);
    const auto labels = torch::tensor({int64_t{1}, classes, int64_t{-1}, int64_t{-100}}).cuda();
    const auto loss = ddp::ops::cross_entropy(logits, labels).loss;
    CHECK(loss.isnan().item<bool>());
    const auto got = grad({loss}, {logits}, {torch::ones({}, torch::kCUDA)})[0].cpu();
    CHECK(got[0].isfinite().all().item<bool>());
    CHECK(got[1].isnan().all().item<bool>());
    CHECK(got[2].isnan().all().item<bool>());
    CHECK(got[3].eq(0).all().item<bool>());
  }
}

TEST_CASE("a variance keeps its digits where one row lies far from the others") {
  // The first row of each channel is 4000 spreads away.
  for (const int64_t side : {4, 56}) {
    CAPTURE(side);
    torch::manual_seed(6);
    auto inputs = make_inputs({16, 64, side, side}, torch::kCUDA, torch::kHalf);
    inputs.x =
        (torch::randn(inputs.x.sizes(), torch::kCUDA) * 0.25).to(torch::kHalf).contiguous(kLast);
    inputs.x.select(0, 0).select(1, 0).select(1, 0).fill_(1000);
    inputs.bn.momentum = 1;
    auto reference = converted(inputs, torch::kDouble);
    run(inputs, Form::Relu);
    run(reference, Form::Relu);
    CHECK(relative_error(inputs.bn.running_var, reference.bn.running_var) <= 1e-6);
    CHECK(relative_error(inputs.bn.running_mean, reference.bn.running_mean) <= 1e-5);
  }
}

TEST_CASE("convolutions run on the device of their input, whichever is current") {
  if (c10::cuda::device_count() < 2) {
    return;
  }
  const auto second = kHalves.device(torch::Device(torch::kCUDA, 1));
  for (const auto& [kernel, stride, side] :
       {std::tuple{3, 1, 2}, {3, 2, 2}, {1, 1, 4}, {3, 1, 8}}) {
    CAPTURE(kernel, stride, side);
    const auto x = image({4, 64, side, side}, second), w = image({64, 64, kernel, kernel}, second);
    const auto xr = lm_test::reference_of(x), wr = lm_test::reference_of(w);
    const auto out = ddp::ops::conv2d(x, w, stride, kernel / 2);
    const auto expected = torch::conv2d(xr, wr, {}, stride, kernel / 2);
    CHECK(relative_error(out, expected) < 0.01);
    const auto got = grad({out}, {x, w}, {torch::ones_like(out)});
    const auto wanted = grad({expected}, {xr, wr}, {torch::ones_like(expected)});
    CHECK(relative_error(got[0], wanted[0]) < 0.01);
    CHECK(relative_error(got[1], wanted[1]) < 0.01);
  }
}
