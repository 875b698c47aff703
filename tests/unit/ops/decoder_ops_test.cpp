// SPDX-License-Identifier: Apache-2.0
// Ops of decoders with separate projections beside those that take joined ones.
#include "ddp/ops/decoder.hpp"

#include <torch/torch.h>

#include "ddp/ops/language.hpp"
#include "ops_test.hpp"
#include "support/catch.hpp"

using ops_test::close;
using ops_test::input;
using torch::autograd::grad;

TEST_CASE("apply_rotary turns as split_heads does, and its gradient turns back") {
  torch::manual_seed(1);
  const auto tables = ddp::ops::make_rotary_tables({.head_dim = 6}, 16, torch::kCPU);
  const auto angles = ddp::ops::rotary_angles(tables, torch::randint(16, {2, 5}, torch::kLong));
  const auto heads = input({2, 5, 3, 6});
  const auto expected = ddp::ops::split_heads(torch::cat({heads, heads, heads}, 2).flatten(2), 3, 3,
                                              {.angles = angles})
                            .query.transpose(1, 2);
  const auto both_halves = [](const torch::Tensor& half) {
    return torch::cat({half, half}, -1).transpose(1, 2);  // [batch, 1, seq, head_dim]
  };
  const auto out = ddp::ops::apply_rotary(heads.transpose(1, 2), both_halves(angles.cos),
                                          both_halves(angles.sin));
  CHECK(close(out, expected));
  CHECK(out.strides() == expected.strides());
  CHECK(close(grad({out}, {heads}, {out.detach()})[0], heads));
  CHECK_THROWS_WITH(ddp::ops::apply_rotary(input({2, 5}), input({5}), input({5})),
                    Catch::Contains("two equal halves"));
}

TEST_CASE("swiglu of separate tensors equals that of joined ones") {
  torch::manual_seed(2);
  const auto gate = input({3, 4}), up = input({3, 4});
  const auto out = ddp::ops::swiglu(gate, up);
  const auto expected = ddp::ops::swiglu(torch::cat({gate, up}, 1));
  CHECK(torch::equal(out, expected));
  const auto direction = torch::randn_like(out);
  const auto own = grad({out}, {gate, up}, {direction});
  const auto wanted = grad({expected}, {gate, up}, {direction});
  CHECK(torch::equal(own[0], wanted[0]));
  CHECK(torch::equal(own[1], wanted[1]));
  CHECK_THROWS_WITH(ddp::ops::swiglu(gate, input({3, 5})), Catch::Contains("one shape"));
}
