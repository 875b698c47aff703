// SPDX-License-Identifier: Apache-2.0
// Kernels of a transformer's residual branches against float64: GELU, dropout that is drawn again,
// and both with the following LayerNorm.
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/torch.h>

#include <cmath>
#include <vector>

#include "ddp/ops/language.hpp"
#include "gpu/language/lm_test.hpp"
#include "support/catch.hpp"

using lm_test::leaf;
using lm_test::reference_of;
using lm_test::relative_error;
using lm_test::tolerance_of;
using torch::autograd::grad;

namespace {

torch::Tensor plain_norm(const torch::Tensor& x, const torch::Tensor& weight,
                         const torch::Tensor& bias) {
  return torch::layer_norm(x, weight.sizes(), weight, bias, 1e-5);
}

/// The share of zeros is p within six standard deviations.
void check_share(const torch::Tensor& mask, double p) {
  const double share = 1 - mask.to(torch::kDouble).mean().item<double>();
  CHECK(std::abs(share - p) < 6 * std::sqrt(p * (1 - p) / static_cast<double>(mask.numel())));
}

}  // namespace

TEST_CASE("gelu with a bias equals float64, exact and by tanh") {
  torch::manual_seed(1);
  const auto dtype = GENERATE(torch::kBFloat16, torch::kHalf);
  const bool has_float_bias = GENERATE(false, true), tanh = GENERATE(false, true);
  const auto [rows, columns] = GENERATE(std::pair(1, 8), std::pair(77, 264), std::pair(3000, 3072));
  CAPTURE(dtype, has_float_bias, tanh, rows, columns);
  const auto x = leaf({rows, columns}, dtype, 3);
  const auto bias = leaf({columns}, has_float_bias ? torch::kFloat : dtype);
  const auto x2 = reference_of(x), b2 = reference_of(bias);
  const auto y = ddp::ops::gelu(x, {.bias = bias, .tanh = tanh});
  const auto y2 = torch::gelu(x2 + b2, tanh ? "tanh" : "none");
  CHECK(y.scalar_type() == dtype);
  CHECK(relative_error(y, y2) < tolerance_of(dtype));
  const auto factors = torch::randn({rows, columns}, torch::kCUDA).to(dtype);
  const auto own = grad({y}, {x, bias}, {factors});
  const auto wanted = grad({y2}, {x2, b2}, {factors.to(torch::kDouble)});
  CHECK(own[1].scalar_type() == bias.scalar_type());
  CHECK(relative_error(own[0], wanted[0]) < tolerance_of(dtype));
  CHECK(relative_error(own[1], wanted[1]) < tolerance_of(dtype));
  const auto plain = ddp::ops::gelu(x, {.tanh = tanh});
  CHECK(relative_error(plain, torch::gelu(x2, tanh ? "tanh" : "none")) < tolerance_of(dtype));
}

TEST_CASE("gelu saturates where its derivative's terms would overflow") {
  const auto x = torch::tensor({-300.0F, -20.0F, 20.0F, 300.0F, -60000.0F, 60000.0F, 0.0F, 1.0F})
                     .to(torch::kCUDA, torch::kBFloat16)
                     .requires_grad_(true);
  for (const bool tanh : {false, true}) {
    const auto y = ddp::ops::gelu(x, {.tanh = tanh});
    const auto dx = grad({y.sum()}, {x})[0].to(torch::kFloat);
    const auto sign = torch::tensor({0.0F, 0.0F, 1.0F, 1.0F, 0.0F, 1.0F}).to(torch::kCUDA);
    CHECK(dx.narrow(0, 0, 6).equal(sign));
    CHECK(y.detach().narrow(0, 0, 6).equal((x.detach().narrow(0, 0, 6) * sign).to(y.dtype())));
  }
}

TEST_CASE("add_layer_norm without dropout equals the sum's norm in float64") {
  torch::manual_seed(2);
  const auto dtype = GENERATE(torch::kBFloat16, torch::kHalf);
  const bool has_float_weights = GENERATE(false, true), has_bias = GENERATE(false, true);
  const int64_t dim = GENERATE(8, 256, 512, 768, 1000, 1024, 2048, 8192);
  const int64_t rows = GENERATE(1, 77, 3000);
  CAPTURE(dtype, has_float_weights, has_bias, dim, rows);
  const auto weights = has_float_weights ? torch::kFloat : dtype;
  const auto branch = leaf({rows, dim}, dtype), residual = leaf({rows, dim}, dtype);
  const auto weight = leaf({dim}, weights), bias = leaf({dim}, weights);
  const auto added = leaf({dim}, weights);
  const auto [y, sum] = ddp::ops::add_layer_norm(branch, residual, weight, bias, 1e-5,
                                                 {.bias = has_bias ? added : torch::Tensor()});
  std::vector<torch::Tensor> inputs = {branch, residual, weight, bias}, references;
  if (has_bias) {
    inputs.push_back(added);
  }
  for (const auto& tensor : inputs) {
    references.push_back(reference_of(tensor));
  }
  auto sum2 = references[0] + references[1];
  if (has_bias) {
    sum2 = sum2 + references[4];
  }
  // The kernel norms the rounded sum.
  const auto y2 = plain_norm(sum2, references[2], references[3]);
  CHECK(relative_error(sum, sum2) < tolerance_of(dtype));
  CHECK(relative_error(y, y2) < 2 * tolerance_of(dtype));
  const auto f1 = torch::randn({rows, dim}, torch::kCUDA).to(dtype);
  const auto f2 = torch::randn({rows, dim}, torch::kCUDA).to(dtype);
  const auto own = grad({y, sum}, inputs, {f1, f2});
  const auto wanted = grad({y2, sum2}, references, {f1.to(torch::kDouble), f2.to(torch::kDouble)});
  for (std::size_t i = 0; i < own.size(); ++i) {
    CAPTURE(i);
    CHECK(own[i].scalar_type() == inputs[i].scalar_type());
    CHECK(relative_error(own[i], wanted[i]) < 2 * tolerance_of(dtype));
  }
}

TEST_CASE("the backward of add_layer_norm and add_branch drops what the forward dropped") {
  const auto dtype = GENERATE(torch::kBFloat16, torch::kHalf);
  const double p = GENERATE(0.1, 0.5);
  const int64_t dim = GENERATE(264, 768, 2048);
  CAPTURE(dtype, p, dim);
  constexpr int64_t kRows = 999;
  const auto ones = torch::ones({kRows, dim}, torch::kCUDA).to(dtype).requires_grad_(true);
  const auto zeros = torch::zeros({kRows, dim}, torch::kCUDA).to(dtype).requires_grad_(true);
  const auto added = torch::zeros({dim}, torch::kCUDA).to(dtype).requires_grad_(true);
  const auto weight = leaf({dim}, dtype), bias = leaf({dim}, dtype);
  const ddp::ops::BranchOptions options = {.bias = added, .dropout_p = p};
  torch::manual_seed(3);
  const auto sum = ddp::ops::add_branch(ones, zeros, options);
  const auto [normed, again] = ddp::ops::add_layer_norm(ones, zeros, weight, bias, 1e-5, options);
  torch::manual_seed(3);
  CHECK(sum.equal(ddp::ops::add_branch(ones, zeros, options)));
  const auto plain = ddp::ops::dropout(ones, p);
  CHECK(plain.equal(again));  // the same elements of the same draws, whatever the kernel
  const auto mask = sum.detach().ne(0);
  check_share(mask, p);
  CHECK_FALSE(sum.equal(again));
  const auto factors = torch::randn({kRows, dim}, torch::kCUDA).to(dtype);
  for (const auto& output : {sum, again}) {
    const auto scaled = output.detach().ne(0).to(torch::kDouble) / (1 - p);
    CHECK(relative_error(output, scaled) < tolerance_of(dtype));
    const auto grads = grad({output}, {ones, zeros, added}, {factors}, /*retain_graph=*/true);
    const auto wanted = factors.to(torch::kDouble) * scaled;
    CHECK(relative_error(grads[0], wanted) < tolerance_of(dtype));
    CHECK(grads[1].equal(factors));
    CHECK(relative_error(grads[2], wanted.sum(0)) < tolerance_of(dtype));
  }
  // Through the norm as well: the branch's gradient is the residual's behind the mask.
  const auto grads = grad({normed}, {ones, zeros}, {factors});
  CHECK(relative_error(grads[0], grads[1].to(torch::kDouble) *
                                     (again.detach().ne(0).to(torch::kDouble) / (1 - p))) <
        tolerance_of(dtype));
}

TEST_CASE("dropout draws anew in each replay, the same in forward and backward") {
  torch::manual_seed(4);
  const auto x = torch::ones({64, 256}, torch::kCUDA).to(torch::kBFloat16).requires_grad_(true);
  const auto factors = torch::ones_like(x);
  at::cuda::CUDAGraph graph;
  torch::Tensor out, dx;
  {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    graph.capture_begin();
    out = ddp::ops::dropout(x, 0.3);
    dx = grad({out}, {x}, {factors})[0];
    graph.capture_end();
  }
  std::vector<torch::Tensor> masks;
  for (int replay = 0; replay < 2; ++replay) {
    graph.replay();
    torch::cuda::synchronize();
    CHECK(dx.equal(out));
    check_share(out.ne(0), 0.3);
    masks.push_back(out.clone());
  }
  CHECK_FALSE(masks[0].equal(masks[1]));
}

TEST_CASE("a recomputed layer drops the same elements") {
  const auto x = leaf({128, 256}, torch::kBFloat16), weight = leaf({256}, torch::kBFloat16);
  const auto body = [&](const std::vector<torch::Tensor>& in) {
    const auto [normed, sum] =
        ddp::ops::add_layer_norm(in[0], in[0], weight, weight, 1e-5, {.dropout_p = 0.4});
    return ddp::ops::add_branch(normed, sum, {.dropout_p = 0.2});
  };
  std::vector<torch::Tensor> grads;
  for (const bool checkpointed : {false, true}) {
    torch::manual_seed(5);
    const auto h = x * 1;
    const auto out = checkpointed ? ddp::ops::checkpoint(body, {h}) : body({h});
    x.mutable_grad() = torch::Tensor();
    out.to(torch::kFloat).square().sum().backward();
    grads.push_back(x.grad());
  }
  CHECK(grads[0].equal(grads[1]));
}
