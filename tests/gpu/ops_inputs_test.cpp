// SPDX-License-Identifier: Apache-2.0
// Inputs that the ops' kernels cannot use directly: on other devices, empty, misaligned, frozen,
// not finite.
#include <ATen/autocast_mode.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/torch.h>

#include <limits>

#include "ddp/ops/decoder.hpp"
#include "ddp/ops/language.hpp"
#include "gpu/vision/batch_norm_test.hpp"
#include "gpu/vision/convolution_test.hpp"
#include "ops/shared/grad_slot.hpp"
#include "ops/streams/side_streams.hpp"
#include "ops/vision/batch_norm_fused.hpp"
#include "ops/vision/convolution_algorithms.hpp"
#include "support/catch.hpp"

using namespace batch_norm_test;
using namespace gpu_test;
using Catch::Contains;
using ddp::ops::Conv2dAlgorithm;
using ddp::ops::StemAlgorithm;

namespace {

const auto kHalves = torch::TensorOptions(torch::kCUDA).dtype(torch::kBFloat16);
// ATen rounds between its ops, which flips the ReLU of values near zero: a few per cent of a sum.
constexpr double kByAten = 0.05;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

torch::Tensor image(torch::IntArrayRef shape, torch::TensorOptions options = kHalves) {
  return torch::randn(shape, options).contiguous(kLast).requires_grad_(true);
}

/// The numbers of `tensor`, one element past a multiple of 16 bytes.
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
    ddp::ops::add_grad_slot(parameter, slot);
  }
  ~Slot() { ddp::ops::remove_grad_slot(parameter, slot); }
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
  // The kernels ran the forward; the gradient is a view at a misaligned address.
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

TEST_CASE("pooled_linear takes a bias of any strides and address") {
  for (const int64_t classes : {10, 100}) {
    const auto x = image({4, 64, 2, 2}), w = torch::randn({classes, 64}, kHalves);
    for (const auto& bias : {torch::randn({classes, 2}, kHalves).select(1, 0),
                             torch::randn({1}, kHalves).expand({classes}),
                             misaligned(torch::randn({classes}, kHalves))}) {
      CAPTURE(classes, bias.strides());
      const auto wanted = torch::linear(x.to(torch::kDouble).mean({2, 3}), w.to(torch::kDouble),
                                        bias.to(torch::kDouble));
      CHECK(relative_error(ddp::ops::pooled_linear(x, w, bias), wanted) < 0.01);
    }
  }
}

TEST_CASE("conv2d takes an expanded filter, and a part of one whose taps begin anywhere") {
  torch::manual_seed(8);
  const auto check = [](const torch::Tensor& x, torch::Tensor w, const torch::Tensor& memory) {
    const int64_t padding = w.size(2) / 2;
    w = w.detach().requires_grad_(true);
    const auto xr = reference_of(x), wr = reference_of(w);
    const auto out = ddp::ops::conv2d(x, w, 1, padding);
    const auto expected = torch::conv2d(xr, wr, {}, 1, padding);
    CHECK(relative_error(out, expected) < 0.01);
    const auto direction = torch::randn_like(out);
    const auto got = grad({out}, {x, w}, {direction}, /*retain_graph=*/true);
    const auto wanted = grad({expected}, {xr, wr}, {direction.to(torch::kDouble)});
    CHECK(relative_error(got[0], wanted[0]) < 0.01);
    CHECK(relative_error(got[1], wanted[1]) < 0.01);
    ddp::ops::GradSlot slot{memory};
    ddp::ops::add_grad_slot(w, slot);
    out.backward(direction);
    CHECK(relative_error(slot.memory, wanted[1]) < 0.01);
    ddp::ops::remove_grad_slot(w, slot);
  };
  const auto row = torch::randn({1, 64, 1, 1}, kHalves).expand({48, 64, 1, 1});
  check(image({4, 64, 7, 7}), row, torch::zeros({48, 64, 1, 1}, kHalves));
  for (const int64_t channels : {12, 20, 36}) {
    CAPTURE(channels);
    const auto whole = torch::randn({16, channels, 3, 3}, kHalves).contiguous(kLast);
    check(image({4, 8, 2, 2}), whole.narrow(1, 0, 8), torch::zeros_like(whole).narrow(1, 0, 8));
  }
}

TEST_CASE("the stem takes images and filters of float64 under autocast") {
  for (const auto& [image_type, weight_type] :
       {std::pair{torch::kBFloat16, torch::kDouble}, {torch::kDouble, torch::kFloat}}) {
    for (const auto algorithm :
         {StemAlgorithm::Auto, StemAlgorithm::SpaceToDepth, StemAlgorithm::Im2col}) {
      CAPTURE(image_type, weight_type, static_cast<int>(algorithm));
      const auto x = image_of({4, 3, 32, 32}, image_type, true);
      const auto w = leaf({64, 3, 7, 7}, weight_type, 0.1);
      const auto wr = w.detach().to(torch::kBFloat16).to(torch::kDouble).requires_grad_(true);
      const auto expected = torch::conv2d(x.to(torch::kBFloat16).to(torch::kDouble), wr, {}, 2, 3);
      at::autocast::set_autocast_enabled(torch::kCUDA, true);
      at::autocast::set_autocast_dtype(torch::kCUDA, torch::kBFloat16);
      const auto out = ddp::ops::stem_convolution(x, w, algorithm);
      at::autocast::set_autocast_enabled(torch::kCUDA, false);
      CHECK(relative_error(out, expected) < 0.01);
      const auto direction = torch::randn_like(out);
      const auto wanted = grad({expected}, {wr}, {direction.to(torch::kDouble)})[0];
      CHECK(relative_error(grad({out}, {w}, {direction})[0], wanted) < 0.01);
    }
  }
}

TEST_CASE("kernels' gradients refuse to be differentiated again") {
  const auto refuses = [](const std::string& op, const torch::Tensor& out,
                          const torch::Tensor& input) {
    CAPTURE(op);
    CHECK_THROWS_WITH(grad({out.sum()}, {input}, {}, true, /*create_graph=*/true),
                      Catch::StartsWith(op) && Contains("create_graph"));
  };
  const auto x = image({4, 64, 8, 8}), stem = image({64, 3, 7, 7});
  for (const int64_t kernel : {1, 3}) {
    refuses("conv2d", ddp::ops::conv2d(x, image({64, 64, kernel, kernel}), 1, kernel / 2), x);
  }
  refuses("stem_convolution", ddp::ops::stem_convolution(image({4, 3, 32, 32}).detach(), stem),
          stem);
  const auto w = torch::randn({10, 64}, kHalves), b = torch::randn({10}, kHalves);
  const auto logits = ddp::ops::pooled_linear(x, w, b);
  refuses("pooled_linear", logits, x);
  const auto labels = torch::zeros({4}, torch::kLong).cuda();
  refuses("cross_entropy", ddp::ops::cross_entropy(logits, labels).loss, logits);
  const auto gate_up = torch::randn({4, 64}, kHalves).requires_grad_(true);
  refuses("swiglu", ddp::ops::swiglu(gate_up), gate_up);
  refuses("swiglu", ddp::ops::swiglu(gate_up, gate_up.detach()), gate_up);
  const auto heads = gate_up.view({1, 1, 4, 64}), angles = heads.detach();
  refuses("apply_rotary", ddp::ops::apply_rotary(heads, angles, angles), gate_up);
  for (const auto& [name, form] : forms()) {
    INFO(name);
    auto inputs = make_inputs({4, 64, 8, 8}, torch::kCUDA, torch::kBFloat16);
    inputs.x.requires_grad_(true);
    refuses("batch_norm", call(inputs, form).branch, inputs.x);
  }
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

TEST_CASE("a small loss and its gradient keep the digits of float32, in each kernel") {
  for (const int64_t classes : {10, 300}) {
    for (const double smoothing : {0.0, 1e-6}) {
      for (const double lead : {4.0, 12.0, 16.0}) {
        CAPTURE(classes, smoothing, lead);
        torch::manual_seed(12);
        const auto labels = torch::randint(classes, {64}, torch::kLong).cuda();
        const auto shift = torch::randn({64, 1}, torch::kCUDA) * 50;  // cancels in the loss
        const auto values = torch::randn({64, classes}, torch::kCUDA) * 0.5 +
                            lead * torch::one_hot(labels, classes) + shift;
        const auto logits = values.to(torch::kFloat).requires_grad_(true);
        const auto reference = lm_test::reference_of(logits);
        const auto loss =
            ddp::ops::cross_entropy(logits, labels, {.label_smoothing = smoothing}).loss;
        const auto expected =
            torch::cross_entropy_loss(reference, labels, {}, at::Reduction::Mean, -100, smoothing);
        CHECK(relative_error(loss, expected) < 1e-5);
        CHECK(relative_error(grad({loss}, {logits})[0], grad({expected}, {reference})[0]) < 1e-5);
      }
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
  // The first row of each channel deviates by 4000 spreads.
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

namespace {

bool has_two_gpus() {
  if (c10::cuda::device_count() < 2) {
    WARN("skipped: 2 GPUs are needed");
    return false;
  }
  return true;
}

const torch::Device kSecond(torch::kCUDA, 1);

}  // namespace

TEST_CASE("convolutions run on the device of their input, whichever is current") {
  if (!has_two_gpus()) {
    return;
  }
  const auto second = kHalves.device(kSecond);
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

TEST_CASE("norms, stem, head, loss and side tasks run on the device of their input") {
  if (!has_two_gpus()) {
    return;
  }
  torch::manual_seed(9);
  const auto second = kHalves.device(kSecond);
  for (const auto& [name, form] : forms()) {
    INFO(name);
    auto inputs = make_inputs({4, 64, 8, 8}, kSecond, torch::kHalf);
    auto reference = converted(inputs, torch::kDouble);
    const auto results = run(inputs, form), expected = run(reference, form);
    for (size_t i = 0; i < results.size(); ++i) {
      INFO(results[i].first);
      CHECK(relative_error(results[i].second, expected[i].second) < 0.01);
    }
  }
  const auto close = [](const torch::Tensor& out, const torch::Tensor& leaf_in,
                        const torch::Tensor& expected, const torch::Tensor& reference) {
    CHECK(relative_error(out, expected) < 0.01);
    CHECK(relative_error(grad({out.sum()}, {leaf_in})[0], grad({expected.sum()}, {reference})[0]) <
          0.01);
  };
  const auto pixels = image({4, 3, 32, 32}, second).detach();
  for (const int64_t size : {3, 7}) {
    const auto w = image({64, 3, size, size}, second), wr = reference_of(w);
    close(ddp::ops::stem_convolution(pixels, w), w,
          torch::conv2d(pixels.to(torch::kDouble), wr, {}, size == 7 ? 2 : 1, size / 2), wr);
  }
  for (const int64_t classes : {10, 100}) {
    const auto x = image({4, 64, 2, 2}, second), xr = reference_of(x);
    const auto w = torch::randn({classes, 64}, second), b = torch::randn({classes}, second);
    close(ddp::ops::pooled_linear(x, w, b), x,
          torch::linear(xr.mean({2, 3}), w.to(torch::kDouble), b.to(torch::kDouble)), xr);
    const auto logits = torch::randn({4, classes}, second).requires_grad_(true);
    const auto lr = reference_of(logits);
    const auto labels = torch::zeros({4}, second.dtype(torch::kLong));
    close(ddp::ops::cross_entropy(logits, labels).loss, logits,
          torch::cross_entropy_loss(lr, labels), lr);
  }
  const auto x = torch::randn({8}, second);
  const ddp::ops::SideStreams streams;
  ddp::ops::SideTask task(x, [](const torch::Tensor& of) { return of * 2; });
  CHECK(torch::equal(task.wait(), x * 2));
}
