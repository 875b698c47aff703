// SPDX-License-Identifier: Apache-2.0
// Copies by rows, and what is made of them, beside LibTorch's operators.
#include "ops/layout/layout.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <catch2/catch.hpp>
#include <functional>
#include <limits>
#include <vector>

#include "ops/layout/row_copy.hpp"

namespace layout = ddp::ops::detail;

namespace {

at::Tensor numbers(at::IntArrayRef sizes, at::ScalarType type) {
  return at::randn(sizes, at::TensorOptions().device(at::kCUDA).dtype(at::kFloat)).to(type);
}

using Function = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

// The result, and the gradients of `inputs` for a random gradient of the result.
std::vector<at::Tensor> run(const Function& function, const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> leaves;
  for (const auto& input : inputs) {
    leaves.push_back(input.detach().clone().requires_grad_());
  }
  const auto result = function(leaves);
  at::manual_seed(3);
  const auto grad = at::randn(result.sizes(), result.options().dtype(at::kFloat));
  auto all = torch::autograd::grad({result}, leaves, {grad.to(result.scalar_type())}, {}, false,
                                   /*allow_unused=*/true);
  all.insert(all.begin(), result.detach());
  return all;
}

void require_same(const Function& function, const Function& twin,
                  const std::vector<at::Tensor>& inputs, double tolerance = 0) {
  const auto ours = run(function, inputs), theirs = run(twin, inputs);
  for (std::size_t i = 0; i < ours.size(); ++i) {
    CAPTURE(i);
    REQUIRE(ours[i].defined() == theirs[i].defined());
    if (!ours[i].defined()) {
      continue;
    }
    REQUIRE(ours[i].sizes() == theirs[i].sizes());
    REQUIRE(ours[i].scalar_type() == theirs[i].scalar_type());
    const auto a = ours[i].to(at::kDouble), b = theirs[i].to(at::kDouble);
    REQUIRE((a - b).abs().max().item<double>() <= tolerance * b.abs().max().item<double>());
  }
}

}  // namespace

TEST_CASE("a copy by rows has the values of copy_()", "[gpu][layout]") {
  at::manual_seed(1);
  const auto type = GENERATE(at::kBFloat16, at::kFloat, at::kByte, at::kDouble);
  const std::vector<std::vector<int64_t>> orders = {
      {0, 1, 2, 3, 4}, {0, 2, 1, 3, 4}, {3, 1, 0, 2, 4}, {2, 0, 3, 1, 4}, {4, 3, 2, 1, 0}};
  // Rows of whole vectors, of half ones, of odd ones, and of less than a vector.
  for (const int64_t row : {96, 4, 20, 49, 3, 1}) {
    for (const auto& order : orders) {
      for (const int64_t offset : {0, 1, 2, 4}) {
        CAPTURE(type, row, offset, order);
        const auto memory = (numbers({3 * 7 * 5 * 2 * row + offset}, at::kFloat) * 50).to(type);
        const auto from = memory.slice(0, offset).view({3, 7, 5, 2, row}).permute(order);
        const auto to = at::zeros(from.sizes(), from.options());
        layout::copy_rows(to, from);
        REQUIRE(at::equal(to, from));
        const auto back = at::zeros_like(memory).slice(0, offset).view({3, 7, 5, 2, row});
        layout::copy_rows(back.permute(order), to);
        REQUIRE(at::equal(back.permute(order), from));
      }
    }
  }
}

TEST_CASE("a copy by rows of parts of a tensor, of many rows, and of none", "[gpu][layout]") {
  const auto whole = numbers({70001, 3, 64}, at::kBFloat16);
  const auto to = at::full({70001, 2, 32}, 7, whole.options());
  layout::copy_rows(to, whole.narrow(1, 1, 2).narrow(2, 32, 32));
  CHECK(at::equal(to, whole.narrow(1, 1, 2).narrow(2, 32, 32)));

  auto kept = at::full({5, 4, 32}, 7, whole.options());
  layout::copy_rows(kept.narrow(1, 1, 2), whole.narrow(0, 0, 5).narrow(1, 0, 2).narrow(2, 0, 32));
  CHECK(at::equal(kept.select(1, 0), at::full({5, 32}, 7, whole.options())));
  CHECK(at::equal(kept.select(1, 3), at::full({5, 32}, 7, whole.options())));
  CHECK(at::equal(kept.narrow(1, 1, 2), whole.narrow(0, 0, 5).narrow(1, 0, 2).narrow(2, 0, 32)));

  // One row for all: stride 0.
  const auto wide = at::empty({4, 6, 32}, whole.options());
  layout::copy_rows(wide, whole.select(0, 0).narrow(0, 0, 1).narrow(1, 0, 32).expand({4, 6, 32}));
  CHECK(at::equal(wide, whole.select(0, 0).narrow(0, 0, 1).narrow(1, 0, 32).expand({4, 6, 32})));
  layout::copy_rows(at::empty({0, 4, 32}, whole.options()), at::empty({0, 4, 32}, whole.options()));
}

TEST_CASE("windows are cut out of an image and put back", "[gpu][layout]") {
  const auto type = GENERATE(at::kBFloat16, at::kFloat);
  const auto x = numbers({2, 14, 21, 96}, type);
  const auto with = [](const auto& reshape, const auto& roll) {
    return [=](const std::vector<at::Tensor>& in) {
      const auto shifted = roll(in[0], std::vector<int64_t>{-3, 10}, std::vector<int64_t>{1, 2});
      const auto windows = shifted.view({2, 2, 7, 3, 7, 96}).permute({0, 1, 3, 2, 4, 5});
      const auto rows = reshape(windows, std::vector<int64_t>{12, -1, 96});
      const auto image = (rows * 3).view({2, 2, 3, 7, 7, 96}).permute({0, 1, 3, 2, 4, 5});
      return roll(reshape(image, std::vector<int64_t>{2, 14, 21, 96}), std::vector<int64_t>{3, -31},
                  std::vector<int64_t>{1, 2});
    };
  };
  require_same(
      with([](const auto& a, const auto& b) { return layout::reshape_rows(a, b); },
           [](const auto& a, const auto& b, const auto& c) { return layout::roll_rows(a, b, c); }),
      with([](const auto& a, const auto& b) { return a.reshape(b); },
           [](const auto& a, const auto& b, const auto& c) { return at::roll(a, b, c); }),
      {x});
}

TEST_CASE("rolls of one dimension follow each other", "[gpu][layout]") {
  const std::vector<int64_t> shifts = {1, 2, -3}, dims = {2, -2, 1};
  require_same(
      [&](const std::vector<at::Tensor>& in) { return layout::roll_rows(in[0], shifts, dims); },
      [&](const std::vector<at::Tensor>& in) { return at::roll(in[0], shifts, dims); },
      {numbers({3, 5, 7, 32}, at::kFloat)});
}

TEST_CASE("results of copies and products may be written", "[gpu][layout]") {
  const auto written = [](const auto& matmul, const auto& reshape) {
    return [=](const std::vector<at::Tensor>& in) {
      const auto a = in[0].transpose(1, 2), b = in[1].transpose(1, 2);
      const auto scores = matmul(a, b.transpose(2, 3));
      scores.add_(1).select(1, 0).mul_(2);
      return reshape(matmul(scores, b).transpose(1, 2)).mul_(3);
    };
  };
  require_same(written([](const auto& a, const auto& b) { return layout::matmul_rows(a, b, 0.5); },
                       [](const auto& x) {
                         return layout::reshape_rows(x, {2, 9, 96});
                       }),
               written([](const auto& a, const auto& b) { return at::matmul(a * 0.5, b); },
                       [](const auto& x) {
                         return x.reshape({2, 9, 96});
                       }),
               {numbers({2, 9, 3, 32}, at::kFloat), numbers({2, 9, 3, 32}, at::kFloat)}, 1e-5);
}

TEST_CASE("parts of negated and conjugated views keep their signs", "[gpu][layout]") {
  const auto complex =
      at::complex(numbers({3, 4, 32}, at::kFloat), numbers({3, 4, 32}, at::kFloat));
  const auto conjugate = complex.requires_grad_().conj();
  for (const auto& whole : {conjugate, at::imag(conjugate)}) {
    const auto parts = layout::select_rows(whole, 0, 3);
    CHECK(at::equal(parts[1].resolve_conj(), whole.select(0, 1).resolve_conj()));
  }
}

TEST_CASE("a factor of 0 keeps what is not finite", "[gpu][layout]") {
  const auto a = numbers({2, 3, 4, 16}, at::kFloat), b = numbers({2, 3, 16, 5}, at::kFloat);
  a[1][2][3][4] = std::numeric_limits<float>::infinity();
  CHECK(at::equal(layout::matmul_rows(a, b, 0).isnan(), at::matmul(a * 0.0, b).isnan()));
}

TEST_CASE("attention composed of products of parts", "[gpu][layout]") {
  const auto type = GENERATE(at::kBFloat16, at::kHalf, at::kFloat);
  const int64_t used = GENERATE(2, 3);  // of query, key and value
  const auto qkv = numbers({6, 49, 3 * 3 * 32}, type);
  const auto with = [used](const auto& select, const auto& matmul, const auto& reshape) {
    return [=](const std::vector<at::Tensor>& in) {
      const auto heads = in[0].view({6, 49, 3, 3, 32}).permute({2, 0, 3, 1, 4});
      const auto parts = select(heads, used);
      const auto scores = matmul(parts[0], parts[1].transpose(-2, -1), 0.25);
      const auto values =
          used == 3 ? matmul(scores.softmax(-1), parts[2], 1.0) : matmul(scores, parts[0], 1.0);
      return reshape(values.transpose(1, 2), std::vector<int64_t>{6, 49, 96});
    };
  };
  require_same(
      with([](const auto& x, int64_t count) { return layout::select_rows(x, 0, count); },
           [](const auto& a, const auto& b, double s) { return layout::matmul_rows(a, b, s); },
           [](const auto& a, const auto& b) { return layout::reshape_rows(a, b); }),
      with(
          [](const auto& x, int64_t count) {
            std::vector<at::Tensor> parts;
            for (int64_t i = 0; i < count; ++i) {
              parts.push_back(x.select(0, i));
            }
            return parts;
          },
          [](const auto& a, const auto& b, double s) { return at::matmul(a * s, b); },
          [](const auto& a, const auto& b) { return a.reshape(b); }),
      {qkv}, type == at::kFloat ? 1e-5 : 3e-2);
}

TEST_CASE("products of what rows do not fit are LibTorch's", "[gpu][layout]") {
  const auto twin = [](const std::vector<at::Tensor>& in) {
    return at::matmul(in[0] * 0.5, in[1]);
  };
  const auto ours = [](const std::vector<at::Tensor>& in) {
    return layout::matmul_rows(in[0], in[1], 0.5);
  };
  require_same(ours, twin, {numbers({2, 3, 4, 5}, at::kFloat), numbers({3, 5, 6}, at::kFloat)},
               1e-5);
  require_same(ours, twin, {numbers({4, 5}, at::kFloat), numbers({5, 6}, at::kFloat)}, 1e-5);
  require_same(ours, twin, {numbers({2, 1, 4, 5}, at::kFloat), numbers({2, 3, 5, 6}, at::kFloat)},
               1e-5);
  require_same(ours, twin, {numbers({2, 3, 4, 5}, at::kDouble), numbers({2, 3, 5, 6}, at::kDouble)},
               1e-12);
}
