// SPDX-License-Identifier: Apache-2.0
// Tensors that share memory share its version, so that a backward refuses memory that has changed.
#include <torch/torch.h>

#include <functional>

#include "ddp/detail/model_weights.hpp"
#include "ddp/ops/language.hpp"
#include "ops_test.hpp"
#include "support/catch.hpp"

using ops_test::close;
using ops_test::input;
using torch::autograd::grad;

namespace {

const auto kRefused = Catch::Contains("modified by an inplace operation");

void scale_in_place(torch::Tensor tensor) {
  const torch::NoGradGuard no_grad;
  tensor.mul_(100);
}

}  // namespace

TEST_CASE("a backward refuses joined weights of which one has changed") {
  torch::manual_seed(1);
  const bool trained = GENERATE(false, true);
  const int changed = GENERATE(0, 1);
  CAPTURE(trained, changed);
  auto w1 = torch::randn({2, 3}, torch::kDouble).requires_grad_(trained);
  auto w2 = torch::randn({2, 3}, torch::kDouble).requires_grad_(trained);
  scale_in_place(w2);  // the parts' versions differ
  ddp::ops::join_rows({w1, w2});
  const auto x = input({4, 3}), a = input({1, 3}), b = input({4, 1});
  const auto change = [&] { scale_in_place(changed == 0 ? w1 : w2); };
  const auto joined = [&] { return ddp::ops::joined_rows({w1, w2}); };
  const auto linear = [&] { return ddp::ops::linear(x, joined()).sum(); };
  const auto adapted = [&] { return ddp::ops::lora_linear(x, joined().detach(), a, b).sum(); };
  for (const std::function<torch::Tensor()>& loss :
       {std::function<torch::Tensor()>(linear), std::function<torch::Tensor()>(adapted)}) {
    const auto unchanged = loss();
    CHECK_NOTHROW(grad({unchanged}, {x}));
    const auto before = loss();
    change();
    CHECK_THROWS_WITH(grad({before}, {x}), kRefused);
    const auto again = loss();
    change();
    CHECK_THROWS_WITH(again.backward(), kRefused);
  }
}

TEST_CASE("joining weights between a forward and its backward changes no gradient") {
  torch::manual_seed(2);
  auto w1 = input({2, 3}), w2 = input({2, 3});
  const auto x = input({4, 3});
  const auto product = [&] { return (torch::linear(x, w1) * torch::linear(x, w2)).sum(); };
  const auto wanted = grad({product()}, {x})[0];
  const auto before = product();
  ddp::ops::join_rows({w1, w2});
  CHECK(close(grad({before}, {x})[0], wanted));
  // A change before the joining is refused after it.
  auto w3 = input({2, 3}), w4 = input({2, 3});
  const auto of_old = (torch::linear(x, w3) * torch::linear(x, w4)).sum();
  scale_in_place(w3);
  ddp::ops::join_rows({w3, w4});
  CHECK_THROWS_WITH(grad({of_old}, {x}), kRefused);
}

TEST_CASE("a backward refuses heads whose joint memory has changed") {
  torch::manual_seed(3);
  const auto x = input({2, 3, 16});
  const auto tables = ddp::ops::make_rotary_tables({.head_dim = 4}, 3, torch::kCPU);
  const auto positions = torch::arange(3).unsqueeze(0).expand({2, 3});
  for (const bool rotary : {false, true}) {
    CAPTURE(rotary);
    const auto loss = [&](const torch::Tensor& qkv) {
      const auto angles =
          rotary ? ddp::ops::rotary_angles(tables, positions) : ddp::ops::RotaryAngles{};
      const auto heads = ddp::ops::split_heads(qkv, 2, 1, {.angles = angles});
      return ddp::ops::attention(heads.query.transpose(1, 2), heads.key.transpose(1, 2),
                                 heads.value.transpose(1, 2))
          .sum();
    };
    CHECK_NOTHROW(loss(x * 1).backward());
    const auto qkv = x * 1;
    const auto before = loss(qkv);
    scale_in_place(qkv.detach());
    CHECK_THROWS_WITH(before.backward(), kRefused);
  }
}
