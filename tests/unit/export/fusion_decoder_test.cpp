// SPDX-License-Identifier: Apache-2.0
// Which rotary positions and gated products ddp::ops replace, and that the numbers stay.
#include "unit/export/fused_network.hpp"

using namespace export_test;

namespace {

/// x [batch, 2, 8, 8] through a layer, so that its gradient is seen, and angles in this dtype.
struct Heads : Network {
  explicit Heads(at::ScalarType weight_type = at::kFloat)
      : Network({2, 8, 8}, weight_type),
        x(linear_layer("x", 8, 8, false)),
        cos(statistics(at::randn({1, 8, 8}))),
        sin(statistics(at::randn({1, 8, 8}))) {}

  std::string x, cos, sin;
};

constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();

const Counts kRotary = {{"linear", 1}, {"apply_rotary", 1}};
const Counts kSwiglu = {{"linear", 1}, {"swiglu", 1}};
const Counts kNeither = {{"linear", 1}};

}  // namespace

TEST_CASE("rotary positions are replaced, and their numbers stay", "[export]") {
  Heads net(GENERATE(at::kFloat, at::kDouble, at::kBFloat16));
  auto x = net.x, cos = net.cos, sin = net.sin;
  int64_t half = 4, dim = 3;
  SECTION("of heads in front of positions") {}
  SECTION("of positions in front of heads") {
    x = net.transpose(x, 1, 2);
    cos = net.transpose(cos, 0, 1);
    sin = net.transpose(sin, 0, 1);
  }
  SECTION("with a dimension from behind") {
    dim = -1;
  }
  SECTION("with angles of another dtype") {
    cos = net.to(cos, GENERATE(at::kFloat, at::kDouble, at::kLong));
  }
  SECTION("with angles of a larger shape") {
    cos = net.statistics(at::randn({5, 1, 1, 1, 8}));
  }
  SECTION("with parts of two sizes") {
    half = 3;
  }
  net.returns(net.rotary(x, cos, sin, half, dim));
  CHECK(fused(net) == kRotary);
  check_equal(net, tokens());
}

TEST_CASE("rotary positions of the first dimensions are replaced", "[export]") {
  Heads net(GENERATE(at::kFloat, at::kBFloat16));
  const auto part = net.slice(net.x, 3, 0, 4), rest = net.slice(net.x, 3, 4, kEnd);
  const auto cos = net.slice(net.cos, 2, 0, 4);
  net.returns(net.cat(net.rotary(part, cos, cos, 2), rest));
  CHECK(fused(net) == kRotary);
  check_equal(net, tokens());
}

TEST_CASE("a cut along another dimension than the last is no rotation of heads", "[export]") {
  Network net({2, 2, 1});
  const auto angles = net.statistics(at::randn({2}));
  net.returns(net.rotary(net.linear_layer("x", 1, 1, false), angles, angles, 1, /*dim=*/2));
  CHECK(fused(net) == kRotary);  // LibTorch's operators run for such sizes
  check_equal(net, at::randn({3, 2, 2, 1}));
}

TEST_CASE("what only resembles rotary positions stays", "[export]") {
  Heads net;
  const auto& x = net.x;
  const auto negative = [&](const std::string& value) { return net.unary("neg.default", value); };
  const auto turned = [&](const std::string& value) { return net.multiply(value, net.sin); };
  SECTION("the straight product behind") {
    const auto product = turned(net.rotate_half(x, 4));
    net.returns(net.add(net.multiply(x, net.cos), product));
  }
  SECTION("a write between") {
    const auto y = negative(x);
    const auto straight = net.multiply(y, net.cos);
    net.with("mul_.Tensor", y, 2);
    net.returns(net.add(straight, turned(net.rotate_half(y, 4))));
  }
  SECTION("parts of two values") {
    const auto y = negative(x);
    const auto straight = net.multiply(y, net.cos);
    const auto first = net.slice(y, 3, 0, 4), second = net.slice(x, 3, 4, kEnd);
    net.returns(net.add(straight, turned(net.cat(negative(second), first))));
  }
  SECTION("parts of another value than the straight product") {
    const auto y = negative(x);
    const auto straight = net.multiply(y, net.cos);
    net.returns(net.add(straight, turned(net.rotate_half(x, 4))));
  }
  SECTION("other parts") {
    const auto [start, cut, from, to, dim] =
        GENERATE(std::tuple(7, 8, 8, kEnd, -1), std::tuple(0, 4, -4, kEnd, -1),
                 std::tuple(0, 4, 4, int64_t{8}, -1), std::tuple(0, 4, 4, kEnd, 3));
    const auto straight = net.multiply(x, net.cos);
    const auto first = net.slice(x, 3, start, cut), second = net.slice(x, 3, from, to);
    net.returns(net.add(straight, turned(net.cat(negative(second), first, dim))));
  }
  SECTION("the other half is negative") {
    const auto straight = net.multiply(x, net.cos);
    const auto first = net.slice(x, 3, 0, 4), second = net.slice(x, 3, 4, kEnd);
    net.returns(net.add(straight, turned(net.cat(second, negative(first)))));
  }
  SECTION("another sum") {
    const bool in_place = GENERATE(false, true);
    const auto straight = net.multiply(x, net.cos);
    net.returns(net.add(straight, turned(net.rotate_half(x, 4)), in_place, in_place ? 1 : 2));
  }
  SECTION("the terms exchanged") {
    const auto straight = net.multiply(x, net.cos);
    net.returns(net.add(turned(net.rotate_half(x, 4)), straight));
  }
  SECTION("a number in place of sines") {
    const auto straight = net.multiply(x, net.cos);
    net.returns(net.add(straight, net.with("mul.Tensor", net.rotate_half(x, 4), 0.5)));
  }
  SECTION("an inner value that somebody reads") {
    const auto straight = net.multiply(x, net.cos), rotated = net.rotate_half(x, 4);
    net.returns(net.add(net.add(straight, turned(rotated)), net.unary("sin.default", rotated)));
  }
  CHECK(fused(net) == kNeither);
  check_equal(net, tokens());
}

TEST_CASE("gated products are replaced, and their numbers stay", "[export]") {
  Heads net(GENERATE(at::kFloat, at::kDouble, at::kBFloat16));
  const auto gate = net.unary("silu.default", net.x);
  const auto mean = [&] {
    return net.call("mean.dim",
                    {{"self", tensor("x")}, {"dim", integers({2})}, {"keepdim", truth(true)}});
  };
  SECTION("gate first") {
    net.returns(net.multiply(gate, "x"));
  }
  SECTION("gate second") {
    net.returns(net.multiply("x", gate));
  }
  SECTION("of one value") {
    net.returns(net.multiply(gate, net.x));
  }
  SECTION("of another dtype") {
    net.returns(net.multiply(gate, net.to("x", GENERATE(at::kFloat, at::kDouble, at::kLong))));
  }
  SECTION("of another shape") {
    net.returns(net.multiply(gate, mean()));
  }
  CHECK(fused(net) == kSwiglu);
  check_equal(net, tokens());
}

TEST_CASE("gated products that stay", "[export]") {
  Heads net;
  const auto y = net.unary("neg.default", net.x);
  SECTION("with a number") {
    net.returns(net.with("mul.Tensor", net.unary("silu.default", y), 2));
  }
  SECTION("of a gate in place") {
    net.returns(net.multiply(net.unary("silu_.default", y), "x"));
  }
  SECTION("of a gate that somebody reads") {
    const auto gate = net.unary("silu.default", y);
    net.returns(net.add(net.multiply(gate, "x"), gate));
  }
  SECTION("of a gate and itself") {
    const auto gate = net.unary("silu.default", y);
    net.returns(net.multiply(gate, gate));
  }
  SECTION("in place") {
    const auto gate = net.unary("silu.default", y);
    net.returns(net.call("mul_.Tensor", {{"self", tensor(gate)}, {"other", tensor("x")}}));
  }
  SECTION("with a write between") {
    const auto z = net.unary("neg.default", "x");
    const auto gate = net.unary("silu.default", z);
    net.with("mul_.Tensor", z, 2);
    net.returns(net.multiply(gate, net.x));
  }
  CHECK(fused(net) == kNeither);
  check_equal(net, tokens());
}
