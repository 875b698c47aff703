// SPDX-License-Identifier: Apache-2.0
// lora_linear's kernels with dropout, compared with the masks that ops::dropout draws from the same
// numbers.
#include <torch/torch.h>

#include <cmath>
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

struct Case {
  int64_t tokens, in, rank;
  std::vector<int64_t> out_sizes;
};

/// The scaled masks of the next call of lora_linear, whose numbers are then drawn again.
std::vector<torch::Tensor> next_masks(const Case& c, torch::Dtype dtype, double p) {
  torch::manual_seed(11);
  std::vector<torch::Tensor> masks;
  const auto ones = torch::ones({c.tokens, c.in}, torch::kCUDA).to(dtype);
  for (std::size_t i = 0; i < c.out_sizes.size(); ++i) {
    const auto kept = ddp::ops::dropout(ones, p).ne(0).to(torch::kDouble);
    masks.push_back(kept / (1 - std::round(p * 65536) / 65536));
  }
  torch::manual_seed(11);
  return masks;
}

}  // namespace

TEST_CASE("lora_linear of several layers equals float64 with each layer's own dropout") {
  const auto dtype = GENERATE(torch::kBFloat16, torch::kHalf);
  const double p = GENERATE(0.0, 0.25);
  // Ranks below, at and above a tile, tokens off every tile, one to three layers.
  const auto c = GENERATE(Case{200, 128, 8, {48, 16, 24}}, Case{333, 64, 64, {128, 64}},
                          Case{64, 192, 72, {40}}, Case{1000, 256, 128, {64, 64, 64}},
                          Case{1, 64, 16, {8, 8}}, Case{515, 64, 40, {32, 8, 8}});
  const bool transposed = GENERATE(false, true);  // the adapters' memory
  CAPTURE(dtype, p, c.tokens, c.in, c.rank, c.out_sizes, transposed);
  int64_t out = 0;
  for (const int64_t size : c.out_sizes) {
    out += size;
  }
  const auto layers = static_cast<int64_t>(c.out_sizes.size());
  const auto x = leaf({c.tokens, c.in}, dtype);
  const auto residual = leaf({c.tokens, out}, dtype);
  const auto weight = leaf({out, c.in}, dtype, 0.1).detach(), bias = leaf({out}, dtype).detach();
  const auto adapter = [&](int64_t rows, int64_t columns) {
    return transposed ? leaf({columns, rows}, dtype, 0.2).detach().t().requires_grad_(true)
                      : leaf({rows, columns}, dtype, 0.2);
  };
  const auto a = adapter(layers * c.rank, c.in), b = adapter(out, c.rank);
  const auto masks = next_masks(c, dtype, p);
  const auto y = ddp::ops::lora_linear(
      x, weight, a, b,
      {.scale = 0.5, .dropout_p = p, .bias = bias, .residual = residual, .out_sizes = c.out_sizes});

  const auto xr = reference_of(x), rr = reference_of(residual), ar = reference_of(a),
             br = reference_of(b);
  std::vector<torch::Tensor> branches;
  int64_t row = 0;
  for (int64_t i = 0; i < layers; ++i) {
    const int64_t size = c.out_sizes[static_cast<std::size_t>(i)];
    const auto dropped = p > 0 ? xr * masks[static_cast<std::size_t>(i)] : xr;
    branches.push_back(
        dropped.mm(ar.narrow(0, i * c.rank, c.rank).t()).mm(br.narrow(0, row, size).t()));
    row += size;
  }
  const auto expected = torch::linear(xr, weight.to(torch::kDouble), bias.to(torch::kDouble)) + rr +
                        0.5 * torch::cat(branches, 1);
  CHECK(relative_error(y, expected) < tolerance_of(dtype));
  const auto direction = torch::randn_like(expected);
  const auto grads = grad({y}, {x, a, b, residual}, {direction.to(dtype)});
  const auto wanted = grad({expected}, {xr, ar, br, rr}, {direction});
  for (std::size_t i = 0; i < grads.size(); ++i) {
    CAPTURE(i);
    // One rounding more than a single product: that of t or of u.
    CHECK(relative_error(grads[i], wanted[i]) < 1.5 * tolerance_of(dtype));
  }
}

TEST_CASE("quantize_weight and FP8 products equal those of the definition on the CPU") {
  torch::manual_seed(12);
  const auto c = GENERATE(Case{200, 128, 8, {48, 16, 32}}, Case{333, 192, 64, {128, 64}},
                          Case{16, 64, 8, {40}}, Case{1, 64, 16, {16, 16}});
  int64_t out = 0;
  for (const int64_t size : c.out_sizes) {
    out += size;
  }
  const bool gated = GENERATE(false, true);
  CAPTURE(c.tokens, c.in, out, gated);
  const auto layers = static_cast<int64_t>(c.out_sizes.size());
  const auto run = [&](at::Device device, const std::vector<torch::Tensor>& values) {
    std::vector<torch::Tensor> on_device;
    for (const auto& value : values) {
      on_device.push_back(value.detach().to(device).requires_grad_(value.requires_grad()));
    }
    const auto y = ddp::ops::lora_linear(on_device[0], on_device[3], on_device[1], on_device[2],
                                         {.scale = 0.5,
                                          .bias = on_device[4],
                                          .out_sizes = c.out_sizes,
                                          .gated = gated,
                                          .fp8 = ddp::ops::quantize_weight(on_device[3])});
    auto results = grad({y}, {on_device[0], on_device[1], on_device[2]},
                        {on_device[5].detach().narrow(1, 0, y.size(1))});
    results.push_back(y);
    return results;
  };
  // A row of zeros, a large and a small one.
  auto x = leaf({c.tokens, c.in}, torch::kBFloat16).detach();
  x[0].mul_(c.tokens > 1 ? 0 : 1);
  x[-1].mul_(1e4);
  x[c.tokens / 2].mul_(1e-6);
  x.requires_grad_(true);
  const std::vector<torch::Tensor> values = {x,
                                             leaf({layers * c.rank, c.in}, torch::kBFloat16, 0.2),
                                             leaf({out, c.rank}, torch::kBFloat16, 0.2),
                                             leaf({out, c.in}, torch::kBFloat16, 0.1).detach(),
                                             leaf({out}, torch::kBFloat16).detach(),
                                             leaf({c.tokens, out}, torch::kBFloat16).detach()};
  const auto weight = ddp::ops::quantize_weight(values[3]);
  const auto expected = ddp::ops::quantize_weight(values[3].cpu());
  CHECK(torch::equal(weight.values.cpu().view(torch::kByte), expected.values.view(torch::kByte)));
  CHECK(torch::equal(weight.scales.cpu(), expected.scales));
  CHECK(torch::equal(weight.transposed_values.cpu().view(torch::kByte),
                     expected.transposed_values.view(torch::kByte)));
  const auto results = run(torch::kCUDA, values), wanted = run(torch::kCPU, values);
  for (std::size_t i = 0; i < results.size(); ++i) {
    CAPTURE(i);
    // Where bf16 results of both devices differ in the last bit, FP8 may round to neighbours.
    CHECK(relative_error(results[i], wanted[i]) <
          (gated ? 0.05 : 1.5 * tolerance_of(torch::kBFloat16)));
  }
}

TEST_CASE("lora_linear drops with the given probability, and each layer differently") {
  constexpr int64_t n = 64, tokens = 4096;
  constexpr double p = 0.05;
  const auto memory = torch::TensorOptions().device(torch::kCUDA).dtype(torch::kBFloat16);
  const auto eye = torch::eye(n, memory);
  const auto y = ddp::ops::lora_linear(
      torch::ones({tokens, n}, memory), torch::zeros({2 * n, n}, memory), torch::cat({eye, eye}),
      torch::cat({eye, eye}), {.dropout_p = p, .out_sizes = {n, n}});
  const auto kept = y.ne(0).to(torch::kDouble);
  const double deviation = std::sqrt(p * (1 - p) / static_cast<double>(kept.numel()));
  CHECK(std::abs(1 - kept.mean().item<double>() - p) < 5 * deviation);
  // Independent masks: both layers drop p^2 of the elements.
  const auto both = (1 - kept.narrow(1, 0, n)) * (1 - kept.narrow(1, n, n));
  CHECK(std::abs(both.mean().item<double>() - p * p) <
        5 * std::sqrt(p * p / static_cast<double>(both.numel())));
}
