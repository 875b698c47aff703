// SPDX-License-Identifier: Apache-2.0
// Kernels of language models against their formulas in float64: products with bias and residual,
// norms, and the loss of a large vocabulary.
#include <torch/torch.h>

#include <limits>
#include <vector>

#include "ddp/detail/model_weights.hpp"
#include "ddp/ops/language.hpp"
#include "gpu/language/lm_test.hpp"
#include "support/catch.hpp"

using lm_test::leaf;
using lm_test::reference_of;
using lm_test::relative_error;
using lm_test::tolerance_of;
using torch::autograd::grad;

namespace {

void check_all(const std::vector<torch::Tensor>& own, const std::vector<torch::Tensor>& wanted,
               double tolerance) {
  REQUIRE(own.size() == wanted.size());
  for (std::size_t i = 0; i < own.size(); ++i) {
    CAPTURE(i);
    CHECK(relative_error(own[i], wanted[i]) < tolerance);
  }
}

torch::Tensor norm_in_float64(const torch::Tensor& x, const torch::Tensor& weight,
                              const torch::Tensor& bias, double eps) {
  return bias.defined() ? torch::layer_norm(x, weight.sizes(), weight, bias, eps)
                        : x * torch::rsqrt(x.square().mean(-1, true) + eps) * weight;
}

}  // namespace

TEST_CASE("linear adds bias and residual and finds all gradients") {
  torch::manual_seed(1);
  const auto dtype = GENERATE(torch::kBFloat16, torch::kHalf, torch::kFloat);
  const bool transposed = GENERATE(false, true);
  const auto [tokens, in, out] =
      GENERATE(std::tuple(300, 64, 96), std::tuple(33, 72, 40), std::tuple(2048, 768, 2304));
  CAPTURE(dtype, transposed, tokens, in, out);
  const auto x = leaf({3, tokens / 3, in}, dtype);
  const auto weight = leaf(
      transposed ? std::vector<int64_t>{in, out} : std::vector<int64_t>{out, in}, dtype, 0.125);
  const auto bias = leaf({out}, dtype), residual = leaf({3, tokens / 3, out}, dtype);
  const auto factors = torch::randn({3, tokens / 3, out}, torch::kCUDA).to(dtype);
  const auto y =
      ddp::ops::linear(x, weight, {.bias = bias, .residual = residual, .transposed = transposed});
  const auto x2 = reference_of(x), w2 = reference_of(weight), b2 = reference_of(bias),
             r2 = reference_of(residual);
  const auto y2 = torch::matmul(x2, transposed ? w2 : w2.t()) + b2 + r2;
  CHECK(y.scalar_type() == dtype);
  CHECK(relative_error(y, y2) < tolerance_of(dtype));
  check_all(grad({y}, {x, weight, bias, residual}, {factors}),
            grad({y2}, {x2, w2, b2, r2}, {factors.to(torch::kDouble)}), tolerance_of(dtype));
  const auto plain = ddp::ops::linear(x, weight, {.transposed = transposed});
  CHECK(relative_error(plain, torch::matmul(x2, transposed ? w2 : w2.t())) < tolerance_of(dtype));
}

TEST_CASE("linear_and_residual adds the residual's gradient to the input's") {
  torch::manual_seed(8);
  const auto dtype = GENERATE(torch::kBFloat16, torch::kHalf, torch::kFloat);
  const auto x = leaf({3, 50, 64}, dtype), weight = leaf({96, 64}, dtype, 0.125);
  const auto direction = torch::randn({3, 50, 96}, torch::kCUDA).to(dtype),
             skip = torch::randn({3, 50, 64}, torch::kCUDA).to(dtype);
  const auto x2 = reference_of(x), w2 = reference_of(weight);
  const auto [y, passed] = ddp::ops::linear_and_residual(x, weight);
  CHECK(torch::equal(passed, x));
  const auto y2 = torch::linear(x2, w2);
  CHECK(relative_error(y, y2) < tolerance_of(dtype));
  const auto product = direction.to(torch::kDouble), through = skip.to(torch::kDouble);
  check_all(grad({y, passed}, {x, weight}, {direction, skip}, /*retain_graph=*/true),
            {grad({y2}, {x2}, {product}, true)[0] + through, grad({y2}, {w2}, {product}, true)[0]},
            tolerance_of(dtype));
  // Only one of both was used.
  CHECK(torch::equal(grad({passed}, {x}, {skip}, true)[0], skip));
  CHECK(relative_error(grad({y}, {x}, {direction})[0], grad({y2}, {x2}, {product})[0]) <
        tolerance_of(dtype));
}

TEST_CASE("a backward refuses an input that was changed as linear_and_residual's residual") {
  const auto x = leaf({64, 64}, torch::kBFloat16), weight = leaf({96, 64}, torch::kBFloat16);
  const auto run = [&](bool changes) {
    const auto result = ddp::ops::linear_and_residual(x * 1, weight);
    if (changes) {
      const torch::NoGradGuard no_grad;
      auto residual = result.residual;
      residual.mul_(2);
    }
    result.product.sum().backward();
  };
  CHECK_NOTHROW(run(false));
  // LibTorch has one message for a saved output and one for a view of it.
  CHECK_THROWS_WITH(run(true), Catch::Contains("modified"));
}

TEST_CASE("norms equal float64, their residual's gradient is added") {
  torch::manual_seed(3);
  const auto dtype = GENERATE(torch::kBFloat16, torch::kHalf);
  const bool has_float_weights = GENERATE(false, true);
  const bool is_rms = GENERATE(false, true);
  const int64_t dim = GENERATE(8, 64, 768, 1000, 1024, 1032, 3584, 8192);
  const int64_t rows = GENERATE(1, 77, 3000);
  CAPTURE(dtype, has_float_weights, is_rms, dim, rows);
  const auto weights = has_float_weights ? torch::kFloat : dtype;
  auto x = (leaf({rows, dim}, dtype).detach() + 3).requires_grad_();  // a mean that must cancel
  const auto weight = leaf({dim}, weights);
  const auto bias = is_rms ? torch::Tensor() : leaf({dim}, weights);
  const auto factors = torch::randn({rows, dim}, torch::kCUDA).to(dtype);
  const auto [y, skipped] =
      is_rms ? ddp::ops::rms_norm(x, weight, 1e-5) : ddp::ops::layer_norm(x, weight, bias, 1e-5);
  const auto x2 = reference_of(x), w2 = reference_of(weight);
  const auto b2 = is_rms ? torch::Tensor() : reference_of(bias);
  const auto y2 = norm_in_float64(x2, w2, b2, 1e-5);
  CHECK(y.scalar_type() == dtype);
  CHECK(skipped.equal(x));
  CHECK(relative_error(y, y2) < tolerance_of(dtype));
  std::vector<torch::Tensor> inputs{x, weight}, references{x2, w2};
  if (!is_rms) {
    inputs.push_back(bias);
    references.push_back(b2);
  }
  const auto wide = factors.to(torch::kDouble);
  check_all(grad({y}, inputs, {factors}, /*retain_graph=*/true),
            grad({y2}, references, {wide}, /*retain_graph=*/true), 2 * tolerance_of(dtype));
  // The residual's gradient alone, and both.
  CHECK(grad({skipped}, {x}, {factors}, /*retain_graph=*/true)[0].equal(factors));
  check_all(grad({y, skipped}, {x}, {factors, factors}), {grad({y2}, {x2}, {wide})[0] + wide},
            tolerance_of(dtype));
}

TEST_CASE("a length that the norm's kernels do not take goes to PyTorch's") {
  torch::manual_seed(4);
  const auto x = leaf({5, 12}, torch::kBFloat16), weight = leaf({12}, torch::kBFloat16),
             bias = leaf({12}, torch::kBFloat16);
  CHECK(ddp::ops::layer_norm(x, weight, bias, 1e-5)
            .normed.equal(torch::layer_norm(x, {12}, weight, bias, 1e-5)));
}

TEST_CASE("the loss of a large vocabulary ignores padding, whatever the logits") {
  torch::manual_seed(5);
  const auto dtype = GENERATE(torch::kBFloat16, torch::kHalf);
  constexpr int64_t kVocab = 50257, kTokens = 200;
  auto weight = leaf({kVocab, 64}, dtype, 0.5);
  ddp::ops::pad_rows(weight);
  {
    const torch::NoGradGuard no_grad;
    weight.narrow(0, 0, 3).mul_(-40);  // logits far below and far above the others
  }
  const auto hidden = leaf({kTokens, 64}, dtype);
  auto labels = torch::randint(kVocab, {kTokens}, torch::kLong).to(torch::kCUDA);
  const auto logits = torch::linear(hidden, weight).detach().to(torch::kDouble);
  labels.narrow(0, 0, 50).copy_(logits.narrow(0, 0, 50).argmax(1));
  labels.narrow(0, 10, 5).fill_(ddp::ops::kIgnoreIndex);
  labels[60] = kVocab - 1;
  const auto result = ddp::ops::linear_cross_entropy(hidden, weight, labels);
  const auto counts = labels.ne(ddp::ops::kIgnoreIndex);
  const auto expected =
      torch::cross_entropy_loss(logits, labels, {}, at::Reduction::Sum, ddp::ops::kIgnoreIndex);
  CHECK(relative_error(result.loss_sum, expected) < 1e-5);
  CHECK(result.num_correct.item<int64_t>() ==
        logits.argmax(1).eq(labels).logical_and(counts).sum().item<int64_t>());
  const auto grads = grad({result.loss_sum}, {hidden, weight});
  auto errors = logits.softmax(1);
  errors.scatter_add_(1, labels.clamp_min(0).unsqueeze(1),
                      torch::full({kTokens, 1}, -1.0, errors.options()));
  errors.mul_(counts.unsqueeze(1));
  check_all(grads, {errors.mm(weight.to(torch::kDouble)), errors.t().mm(hidden.to(torch::kDouble))},
            2 * tolerance_of(dtype));
  CHECK(grads[0].narrow(0, 10, 5).eq(0).all().item<bool>());
}

TEST_CASE("logits that are not finite, and labels outside the vocabulary, give NaN") {
  torch::manual_seed(6);
  const auto weight = leaf({1024, 64}, torch::kBFloat16);
  const auto hidden = leaf({6, 64}, torch::kBFloat16);
  const auto loss_of = [&](const torch::Tensor& rows, int64_t label) {
    const auto labels = torch::full({6}, label, torch::kLong).to(torch::kCUDA);
    return ddp::ops::linear_cross_entropy(rows, weight, labels).loss_sum;
  };
  CHECK(std::isfinite(loss_of(hidden, 5).item<float>()));
  CHECK(std::isnan(loss_of(hidden, 1024).item<float>()));
  CHECK(std::isnan(loss_of(hidden, -1).item<float>()));
  CHECK(loss_of(hidden, ddp::ops::kIgnoreIndex).item<float>() == 0);
  const auto broken = hidden.detach().clone();
  broken[2][3] = std::numeric_limits<float>::infinity();
  CHECK(std::isnan(loss_of(broken, 5).item<float>()));
  broken[2][3] = std::numeric_limits<float>::quiet_NaN();
  CHECK(std::isnan(loss_of(broken, 5).item<float>()));
}

TEST_CASE("swiglu and rotary positions equal float64, for transposed gradients too") {
  torch::manual_seed(7);
  const auto dtype = GENERATE(torch::kBFloat16, torch::kHalf);
  const auto gate = leaf({3, 70, 64}, dtype, 2), up = leaf({3, 70, 64}, dtype);
  const auto gate2 = reference_of(gate), up2 = reference_of(up);
  const auto y = ddp::ops::swiglu(torch::cat({gate, up}, -1));
  const auto y2 = torch::silu(gate2) * up2;
  const auto factors = torch::randn({70, 3, 64}, torch::kCUDA).to(dtype).transpose(0, 1);
  CHECK(relative_error(y, y2) < tolerance_of(dtype));
  check_all(grad({y}, {gate, up}, {factors}),
            grad({y2}, {gate2, up2}, {factors.to(torch::kDouble)}), tolerance_of(dtype));

  const int64_t head_dim = GENERATE(16, 64, 128);
  CAPTURE(head_dim);
  const auto angles = ddp::ops::rotary_angles(
      ddp::ops::make_rotary_tables({.head_dim = head_dim}, 300, torch::kCUDA),
      torch::randint(300, {2, 50}, torch::kLong).to(torch::kCUDA));
  const auto x = leaf({2, 50, 3, head_dim}, dtype);
  const auto bias = leaf({9 * head_dim}, dtype);
  const auto heads = ddp::ops::split_heads(torch::cat({x, x, x}, 2).flatten(2), 3, 3,
                                           {.angles = angles, .added_bias = bias});
  const auto& turned = heads.query;
  CHECK(torch::equal(heads.key, turned));
  CHECK(torch::equal(heads.value, x));
  const auto a = x.to(torch::kDouble).narrow(3, 0, head_dim / 2),
             b = x.to(torch::kDouble).narrow(3, head_dim / 2, head_dim / 2);
  const auto expected =
      torch::cat({a * angles.cos - b * angles.sin, b * angles.cos + a * angles.sin}, 3);
  CHECK(relative_error(turned, expected) < tolerance_of(dtype));
  const auto heads_first = [&] {
    return torch::randn({2, 3, 50, head_dim}, torch::kCUDA).to(dtype).transpose(1, 2);
  };
  const auto dq = heads_first(), dk = heads_first(), dv = heads_first();
  const auto turned_back = [&](const torch::Tensor& grad_heads) {
    const auto first = grad_heads.to(torch::kDouble).narrow(3, 0, head_dim / 2);
    const auto second = grad_heads.to(torch::kDouble).narrow(3, head_dim / 2, head_dim / 2);
    return torch::cat(
        {first * angles.cos + second * angles.sin, second * angles.cos - first * angles.sin}, 3);
  };
  const auto grads = grad({turned, heads.key, heads.value}, {x, bias}, {dq, dk, dv});
  const auto of_qkv = torch::cat({turned_back(dq), turned_back(dk), dv.to(torch::kDouble)}, 2);
  CHECK(relative_error(grads[0], turned_back(dq) + turned_back(dk) + dv.to(torch::kDouble)) <
        2 * tolerance_of(dtype));
  CHECK(relative_error(grads[1], of_qkv.flatten(0, 1).sum(0).flatten()) < tolerance_of(dtype));
}
