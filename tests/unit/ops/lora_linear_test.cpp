// SPDX-License-Identifier: Apache-2.0
// lora_linear() compared with its formula composed by autograd, in plain and in FP8 weights.
#include <torch/torch.h>

#include <cmath>

#include "ddp/detail/model_weights.hpp"
#include "ddp/ops/language.hpp"
#include "ops_test.hpp"
#include "support/catch.hpp"

using ops_test::close;
using ops_test::input;
using torch::autograd::grad;

TEST_CASE("lora_linear equals its formula, also where A and B are of another dtype") {
  torch::manual_seed(5);
  for (const auto dtype : {torch::kDouble, torch::kFloat}) {
    const auto x = input({2, 3, 8});
    const auto weight = torch::randn({5, 8}, torch::kDouble);
    const auto bias = torch::randn({5}, torch::kDouble);
    const auto a = input({4, 8}, dtype), b = input({5, 4}, dtype);
    const auto out = ddp::ops::lora_linear(x, weight, a, b, {.scale = 2, .bias = bias});
    const auto expected =
        torch::linear(x, weight, bias) +
        2 * torch::linear(torch::linear(x, a.to(torch::kDouble)), b.to(torch::kDouble));
    CHECK(close(out, expected));
    const auto weights = torch::randn_like(out);
    const auto grads = grad({out}, {x, a, b}, {weights});
    const auto wanted = grad({expected}, {x, a, b}, {weights});
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(grads[i].dtype() == wanted[i].dtype());
      CHECK(close(grads[i], wanted[i], 1e-5));
    }
  }
}

TEST_CASE("lora_linear's backward drops what its forward dropped") {
  const auto x = input({4, 64});
  const auto weight = torch::randn({5, 64}, torch::kDouble);
  const auto a = input({4, 64}), b = input({5, 4});
  torch::manual_seed(6);
  const auto out = ddp::ops::lora_linear(x, weight, a, b, {.scale = 0.5, .dropout_p = 0.4});
  torch::manual_seed(6);
  const auto dropped = std::get<0>(torch::native_dropout(x, 0.4, true));
  const auto expected =
      torch::linear(x, weight) + 0.5 * torch::linear(torch::linear(dropped, a), b);
  CHECK(close(out, expected));
  CHECK(torch::count_nonzero(dropped).item<int64_t>() < dropped.numel());
  const auto weights = torch::randn_like(out);
  const auto grads = grad({out}, {x, a, b}, {weights});
  const auto wanted = grad({expected}, {x, a, b}, {weights});
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(close(grads[i], wanted[i]));
  }
}

TEST_CASE("lora_linear of several layers equals each layer alone, with its own dropout") {
  const auto x = input({4, 64});
  const auto residual = input({4, 12});
  const auto weight = torch::randn({12, 64}, torch::kDouble);
  const auto bias = torch::randn({12}, torch::kDouble);
  const auto a = input({6, 64}), b = input({12, 2});
  const std::vector<int64_t> out_sizes = {5, 3, 4};
  for (const double p : {0.0, 0.4}) {
    torch::manual_seed(6);
    const auto out = ddp::ops::lora_linear(
        x, weight, a, b,
        {.scale = 0.5, .dropout_p = p, .bias = bias, .residual = residual, .out_sizes = out_sizes});
    torch::manual_seed(6);
    std::vector<torch::Tensor> results;
    int64_t row = 0, rank = 0;
    for (const int64_t size : out_sizes) {
      results.push_back(ddp::ops::lora_linear(
          x, weight.narrow(0, row, size), a.narrow(0, rank, 2), b.narrow(0, row, size),
          {.scale = 0.5, .dropout_p = p, .bias = bias.narrow(0, row, size)}));
      row += size;
      rank += 2;
    }
    const auto expected = torch::cat(results, 1) + residual;
    CHECK(close(out, expected));
    const auto weights = torch::randn_like(out);
    const auto grads = grad({out}, {x, a, b, residual}, {weights});
    const auto wanted = grad({expected}, {x, a, b, residual}, {weights});
    for (std::size_t i = 0; i < 4; ++i) {
      CHECK(close(grads[i], wanted[i]));
    }
  }
  CHECK_THROWS_WITH(ddp::ops::lora_linear(x, weight, a, b, {.out_sizes = {5, 3}}),
                    Catch::Contains("do not fit each other"));
  CHECK_THROWS_WITH(
      ddp::ops::lora_linear(x, weight, a, b, {.bias = input({5}), .out_sizes = out_sizes}),
      Catch::Contains("bias [5] is not [12]"));
  CHECK_THROWS_WITH(
      ddp::ops::lora_linear(x, weight, a, b, {.residual = input({1, 12}), .out_sizes = out_sizes}),
      Catch::Contains("residual [1, 12] is not [4, 12]"));
}

TEST_CASE("FP8 weights have a scale per row and per column, each with its largest number") {
  torch::manual_seed(8);
  auto weight = torch::randn({6, 16});
  weight[2].zero_();
  weight[3].mul_(1e-5);
  weight[4].fill_(1e-37)[0].zero_();  // 448 / 1e-37 would be infinite, and 0 times that NaN
  const auto fp8 = ddp::ops::quantize_weight(weight);
  const auto restored = fp8.values.to(torch::kFloat) * fp8.scales.unsqueeze(1);
  const auto turned =
      (fp8.transposed_values.to(torch::kFloat) * fp8.transposed_scales.unsqueeze(1)).t();
  // e4m3 has three bits after the leading one: half of 2^-3 of each element.
  CHECK(((restored - weight).abs() <= weight.abs() / 16 + 1e-7 * fp8.scales.unsqueeze(1))
            .all()
            .item<bool>());
  CHECK(close(turned, weight, 0.07));
  CHECK(fp8.values.to(torch::kFloat).abs().amax(1).eq(448).sum().item<int64_t>() == 4);
  CHECK(fp8.scales[2].item<float>() == 1);
  CHECK(fp8.transposed_values.to(torch::kFloat).abs().amax(1).eq(448).all().item<bool>());
}

TEST_CASE("lora_linear with an FP8 base multiplies what FP8 holds, and leaves the adapter exact") {
  torch::manual_seed(9);
  const auto quantized = [](const torch::Tensor& matrix) {
    const auto scales = matrix.abs().amax(1, true) / 448;
    return (matrix / scales).to(torch::kFloat8_e4m3fn).to(torch::kFloat) * scales;
  };
  const auto x = input({5, 32}, torch::kFloat), a = input({4, 32}, torch::kFloat),
             b = input({6, 4}, torch::kFloat);
  const auto weight = torch::randn({6, 32}), bias = torch::randn({6});
  const auto out = ddp::ops::lora_linear(
      x, weight, a, b, {.scale = 2, .bias = bias, .fp8 = ddp::ops::quantize_weight(weight)});
  const auto branch = 2 * torch::linear(torch::linear(x, a), b);
  CHECK(close(out, torch::linear(quantized(x), quantized(weight), bias) + branch, 1e-4));
  const auto dy = torch::randn_like(out);
  const auto grads = grad({out}, {x, a, b}, {dy});
  const auto of_branch = grad({branch}, {x, a, b}, {dy}, /*retain_graph=*/true);
  const auto of_base = quantized(dy).mm(quantized(weight.t().contiguous()).t());
  CHECK(close(grads[0], of_base + of_branch[0], 1e-4));
  CHECK(close(grads[1], of_branch[1], 1e-4));
  CHECK(close(grads[2], of_branch[2], 1e-4));

  const auto gated =
      ddp::ops::lora_linear(x, weight, a, b, {.scale = 2, .bias = bias, .gated = true});
  const auto composed = ddp::ops::swiglu(torch::linear(x, weight, bias) + branch);
  CHECK(close(gated, composed, 1e-4));
  const auto dh = torch::randn_like(gated);
  const auto of_gated = grad({gated}, {x, a, b}, {dh}), wanted = grad({composed}, {x, a, b}, {dh});
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    CHECK(close(of_gated[i], wanted[i], 1e-4));
  }
}

TEST_CASE("an FP8 layer stays near float32 where some channels are outliers") {
  torch::manual_seed(14);
  constexpr int64_t tokens = 256, in = 512, out = 384, rank = 8;
  const auto weight = torch::randn({out, in}) / std::sqrt(double{in});
  const auto a = input({rank, in}, torch::kFloat), b = torch::zeros({out, rank});
  b.requires_grad_(true);
  const auto dy = torch::randn({tokens, out});
  const auto error = [](const torch::Tensor& got, const torch::Tensor& wanted) {
    return ((got - wanted).norm() / wanted.norm()).item<double>();
  };
  // Six of 512 channels are `scale` times as large as the others, as in large language models
  // (Dettmers et al., arXiv:2208.07339). A scale per row gives the outliers' rounding to all.
  for (const double scale : {1.0, 20.0, 60.0}) {
    CAPTURE(scale);
    auto x = torch::randn({tokens, in});
    x.narrow(1, 100, 6).mul_(scale);
    x.requires_grad_(true);
    const auto exact = ddp::ops::lora_linear(x, weight, a, b);
    const auto fp8 =
        ddp::ops::lora_linear(x, weight, a, b, {.fp8 = ddp::ops::quantize_weight(weight)});
    const auto of_exact = grad({exact}, {x, a, b}, {dy}), of_fp8 = grad({fp8}, {x, a, b}, {dy});
    CAPTURE(error(fp8, exact), error(of_fp8[0], of_exact[0]));
    CHECK(error(fp8, exact) < 0.05);
    CHECK(error(fp8, exact) > 0.01);  // e4m3 has three fractional bits
    CHECK(error(of_fp8[0], of_exact[0]) < 0.05);
    CHECK(close(of_fp8[2], of_exact[2], 1e-4));  // the adapter reads the exact input
  }
}

TEST_CASE("a trained base gets its gradients, and with FP8 weights it is refused") {
  torch::manual_seed(10);
  const auto x = input({6, 16}), weight = input({8, 16}), bias = input({8});
  const auto a = input({4, 16}), b = input({8, 4}), residual = input({6, 8});
  const auto out =
      ddp::ops::lora_linear(x, weight, a, b, {.scale = 2, .bias = bias, .residual = residual});
  const auto expected =
      torch::linear(x, weight, bias) + residual + 2 * torch::linear(torch::linear(x, a), b);
  const auto weights = torch::randn_like(out);
  const std::vector<torch::Tensor> all = {x, weight, bias, residual, a, b};
  const auto grads = grad({out}, all, {weights});
  const auto wanted = grad({expected}, all, {weights});
  for (std::size_t i = 0; i < all.size(); ++i) {
    CHECK(close(grads[i], wanted[i]));
  }
  const auto half = torch::randn({16, 16}).requires_grad_();
  CHECK_THROWS_WITH(ddp::ops::lora_linear(torch::randn({4, 16}), half, torch::randn({4, 16}),
                                          torch::randn({16, 4}),
                                          {.fp8 = ddp::ops::quantize_weight(half.detach())}),
                    Catch::Contains("freeze the weight"));
}
