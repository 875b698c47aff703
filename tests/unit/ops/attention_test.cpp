// SPDX-License-Identifier: Apache-2.0
#include "ddp/ops/language.hpp"

#include <torch/torch.h>

#include <cmath>
#include <limits>

#include "support/catch.hpp"

using ddp::ops::AttentionBackend;

namespace {

/// The definition, head by head: q [batch, heads, len, dim].
torch::Tensor by_hand(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                      bool causal) {
  const int64_t share = q.size(1) / k.size(1);
  std::vector<torch::Tensor> heads;
  for (int64_t h = 0; h < q.size(1); ++h) {
    auto scores = torch::matmul(q.select(1, h), k.select(1, h / share).transpose(1, 2)) /
                  std::sqrt(static_cast<double>(q.size(3)));
    if (causal) {
      const auto later = torch::ones({q.size(2), q.size(2)}, torch::kBool).triu(1);
      scores = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
    }
    heads.push_back(torch::matmul(scores.softmax(-1), v.select(1, h / share)));
  }
  return torch::stack(heads, 1);
}

torch::Tensor operand(torch::IntArrayRef shape) {
  return torch::randn(shape, torch::kDouble).requires_grad_(true);
}

}  // namespace

TEST_CASE("attention is the softmax of scaled scores, with fewer key heads than query heads") {
  torch::manual_seed(1);
  for (const auto backend : {AttentionBackend::Auto, AttentionBackend::Math}) {
    for (const bool causal : {true, false}) {
      const auto q = operand({2, 6, 5, 8}), k = operand({2, 2, 5, 8}), v = operand({2, 2, 5, 8});
      const auto out = ddp::ops::attention(q, k, v, {.backend = backend, .is_causal = causal});
      const auto expected = by_hand(q, k, v, causal);
      CHECK(torch::allclose(out, expected, 1e-10, 1e-12));
      const auto weight = torch::randn_like(out);
      const auto grads = torch::autograd::grad({out}, {q, k, v}, {weight});
      const auto wanted = torch::autograd::grad({expected}, {q, k, v}, {weight});
      for (std::size_t i = 0; i < 3; ++i) {
        CHECK(torch::allclose(grads[i], wanted[i], 1e-9, 1e-11));
      }
    }
  }
}

TEST_CASE("attention reads heads of any strides and offsets, also of length 1") {
  torch::manual_seed(4);
  for (const auto backend : {AttentionBackend::Auto, AttentionBackend::Math}) {
    for (const int64_t length : {1, 5}) {
      for (const bool masked : {false, true}) {
        CAPTURE(static_cast<int>(backend), length, masked);
        // Heads behind positions, in a buffer with one more column before them.
        const auto all = operand({2, length, 10, 9});
        const auto heads = [&](int64_t first, int64_t count) {
          return all.narrow(2, first, count).narrow(3, 1, 8).transpose(1, 2);
        };
        const auto q = heads(0, 6), k = heads(6, 2), v = heads(8, 2);
        const auto mask = masked ? torch::zeros({2, 1, 1, length}) : torch::Tensor();
        const auto out =
            ddp::ops::attention(q, k, v, {.backend = backend, .is_causal = !masked, .mask = mask});
        const auto expected = by_hand(q, k, v, !masked);
        CHECK(torch::allclose(out, expected, 1e-10, 1e-12));
        const auto weight = torch::randn_like(out);
        const auto grad = torch::autograd::grad({out}, {all}, {weight})[0];
        const auto wanted = torch::autograd::grad({expected}, {all}, {weight})[0];
        CHECK(torch::allclose(grad, wanted, 1e-9, 1e-11));
      }
    }
  }
}

TEST_CASE("packed documents attend to themselves alone") {
  torch::manual_seed(2);
  const std::vector<int64_t> lengths = {3, 1, 6};
  const auto offsets = torch::tensor({0, 3, 4, 10}, torch::kInt);
  const auto q = operand({10, 4, 8}), k = operand({10, 2, 8}), v = operand({10, 2, 8});
  const auto out = ddp::ops::packed_attention(q, k, v, offsets, 6);
  REQUIRE(out.sizes() == q.sizes());
  int64_t first = 0;
  for (const int64_t length : lengths) {
    const auto part = [&](const torch::Tensor& all) {
      return all.narrow(0, first, length).transpose(0, 1).unsqueeze(0);
    };
    const auto alone = by_hand(part(q), part(k), part(v), true).squeeze(0).transpose(0, 1);
    CHECK(torch::allclose(out.narrow(0, first, length), alone, 1e-10, 1e-12));
    first += length;
  }
  // A document's contents do not affect another document.
  const auto grads = torch::autograd::grad({out.narrow(0, 4, 6).sum()}, {k});
  CHECK(grads[0].narrow(0, 0, 4).abs().max().item<double>() == 0);
  CHECK(grads[0].narrow(0, 4, 6).abs().max().item<double>() > 0);
}

TEST_CASE("a mask takes keys out of the softmax") {
  torch::manual_seed(3);
  for (const int64_t q_len : {1, 4}) {  // one query folds its heads below the key heads
    const auto q = operand({2, 6, q_len, 8}), k = operand({2, 2, 7, 8}), v = operand({2, 2, 7, 8});
    auto mask = torch::zeros({2, 1, 1, 7});
    mask.narrow(3, 5, 2).fill_(-std::numeric_limits<float>::infinity());
    const auto out = ddp::ops::attention(q, k, v, {.is_causal = false, .mask = mask});
    const auto alone = by_hand(q, k.narrow(2, 0, 5), v.narrow(2, 0, 5), false);
    CHECK(torch::allclose(out, alone, 1e-10, 1e-12));
    CHECK_THROWS_WITH(ddp::ops::attention(q, k.narrow(2, 0, q_len), v.narrow(2, 0, q_len),
                                          {.mask = mask.narrow(3, 0, q_len)}),
                      Catch::Contains("is_causal is set"));
  }
  const auto q = torch::randn({4, 2, 8});
  CHECK_THROWS_WITH(ddp::ops::packed_attention(q, q, q, torch::tensor({0, 4}, torch::kInt), 4,
                                               {.mask = torch::zeros({1, 1, 4, 4})}),
                    Catch::Contains("packed attention does not accept a mask"));
  CHECK_THROWS_WITH(ddp::ops::packed_attention(q, q, q, torch::tensor({0, 4}, torch::kInt), 4,
                                               {.backend = AttentionBackend::Cudnn}),
                    Catch::Contains("cudnn cannot be used with packed documents"));
}

TEST_CASE("bool and floating-point masks mean what they mean in PyTorch") {
  torch::manual_seed(4);
  for (const int64_t q_len : {1, 4}) {
    for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
      CAPTURE(q_len, dtype);
      const auto heads = [&](int64_t count, int64_t length) {
        return torch::randn({2, count, length, 8}).to(dtype).requires_grad_(true);
      };
      const auto q = heads(6, q_len), k = heads(2, 7), v = heads(2, 7);
      auto reads = torch::rand({2, 1, q_len, 7}).gt(0.4);
      reads.select(2, 0).select(0, 1).fill_(false);  // a query that reads nothing
      for (const auto& mask : {reads, torch::randn({2, 1, q_len, 7}).to(dtype)}) {
        const auto out = ddp::ops::attention(q, k, v, {.is_causal = false, .mask = mask});
        const auto expected =
            torch::scaled_dot_product_attention(q, k, v, mask, 0, false, {}, /*enable_gqa=*/true);
        const double tolerance = dtype == torch::kFloat ? 1e-5 : 2e-2;
        CHECK(torch::allclose(out, expected, tolerance, tolerance));
        const auto direction = torch::randn_like(out);
        const auto grads = torch::autograd::grad({out}, {q, k, v}, {direction});
        const auto wanted = torch::autograd::grad({expected}, {q, k, v}, {direction});
        for (std::size_t i = 0; i < 3; ++i) {
          CHECK(torch::allclose(grads[i], wanted[i], tolerance, 4 * tolerance));
        }
      }
      CHECK_THROWS_WITH(
          ddp::ops::attention(q, k, v, {.is_causal = false, .mask = reads.to(torch::kLong)}),
          Catch::Contains("attention mask of Long") && Catch::Contains("bool"));
    }
  }
}

TEST_CASE("a backend that cannot serve the inputs says why") {
  const auto q = torch::randn({1, 2, 4, 8});
  using Catch::Contains;
  CHECK_THROWS_WITH(ddp::ops::attention(q, q, q, {.backend = AttentionBackend::Cudnn}),
                    Contains("cudnn cannot be used: it needs a GPU"));
  CHECK_THROWS_WITH(ddp::ops::attention(q, q, q, {.backend = AttentionBackend::Flash}),
                    Contains("flash cannot be used"));
  CHECK_THROWS_WITH(ddp::ops::attention(q, q.narrow(2, 0, 3), q.narrow(2, 0, 3)),
                    Contains("as many queries as keys"));
  const auto three = torch::randn({1, 3, 4, 8});
  CHECK_THROWS_WITH(ddp::ops::attention(three, q, q), Contains("3 query heads cannot share 2"));
}
