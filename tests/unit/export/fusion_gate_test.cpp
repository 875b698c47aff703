// SPDX-License-Identifier: Apache-2.0
// Squeeze and excitation in exported programs: which products of a gate are replaced, and that the
// numbers stay.
#include "unit/export/gated_network.hpp"

using namespace export_test;

namespace {

int num_replaced(const Network& net) {
  const auto counts = fused(net);
  const auto found = counts.find("scale_channels");
  const int products = found == counts.end() ? 0 : found->second;
  const auto means = counts.find("channel_means");
  CHECK((means == counts.end() ? 0 : means->second) == products);  // one needs the other
  return products;
}

}  // namespace

TEST_CASE("squeeze and excitation is replaced, and its numbers stay", "[export]") {
  GateForm form = GENERATE(GateForm{}, timm_gate());
  form.gate = GENERATE("sigmoid.default", "hardsigmoid.default", "sigmoid_.default");
  const auto net = gated_network(form);
  CHECK(fused(net) == Counts{{"channel_means", 2},
                             {"scale_channels", 2},
                             {"batch_norm_silu", 2},
                             {"batch_norm", 2},
                             {"conv2d", 8}});
  check_equal(net, images());
}

TEST_CASE("the product takes the pool's second result", "[export]") {
  const auto net = gated_network({.activation = "relu.default"});
  auto program = ddp::detail::read_program(net.program().dump());
  CHECK(ddp::detail::fuse(program).at("batch_norm_relu") == 2);
  int pools = 0;
  for (const auto& node : program.graph.nodes) {
    if (node.target == "batch_norm_relu") {
      CHECK(node.outputs.size() == 1);  // the pool forks
    } else if (node.target == "channel_means") {
      ++pools;
      REQUIRE(node.outputs.size() == 2);
      const auto& twin = node.outputs[1].name()->name;
      int readers = 0;
      for (const auto& other : program.graph.nodes) {
        const auto* x = other.input("x");
        readers += static_cast<int>(other.target == "scale_channels" && x->name()->name == twin);
      }
      CHECK(readers == 1);
    }
  }
  CHECK(pools == 2);
  check_equal(net, images());
}

TEST_CASE("a gated value that somebody else needs stays", "[export]") {
  const auto form = GENERATE(GateForm{}, timm_gate());
  Network net;
  const auto x = net.unary("silu.default", net.conv("x", 3));
  const auto y =
      product_of(net, gate_of(net, global_pool(net, x, form.by_mean)), x, form.scale_first);
  SECTION("a third reader") {
    net.returns(net.add(y, net.unary("tanh.default", x)));
    check_equal(net, images());
  }
  SECTION("the program's caller") {
    net.returns(y).returns(x);
  }
  CHECK(num_replaced(net) == 0);
}

TEST_CASE("products that are no squeeze and excitation stay", "[export]") {
  Network net;
  const auto x = net.unary("silu.default", net.conv("x", 3));
  SECTION("with a pool of 2 x 2 pixels") {
    const auto means = net.call("adaptive_avg_pool2d.default",
                                {{"self", tensor(x)}, {"output_size", integers({2, 2})}});
    const auto corner = net.slice(net.slice(means, 2, 0, 1), 3, 0, 1);
    net.returns(net.multiply(gate_of(net, corner), x));
  }
  SECTION("with means of rows") {
    const auto means = net.call(
        "mean.dim", {{"self", tensor(x)}, {"dim", integers({3})}, {"keepdim", truth(true)}});
    net.returns(net.multiply(gate_of(net, means), x));
  }
  SECTION("with means that lose their dimensions") {
    const auto means = net.call("mean.dim", {{"self", tensor(x)}, {"dim", integers({2, 3})}});
    net.returns(net.multiply(gate_of(net, net.view(means, {-1, 4, 1, 1})), x));
  }
  SECTION("with means in another dtype") {
    const auto means = net.call("mean.dim", {{"self", tensor(x)},
                                             {"dim", integers({2, 3})},
                                             {"keepdim", truth(true)},
                                             {"dtype", dtype_name(at::kDouble)}});
    net.returns(net.multiply(gate_of(net, net.to(means, at::kFloat)), x));
  }
  SECTION("with a gate of another kind") {
    net.returns(net.multiply(gate_of(net, global_pool(net, x), "tanh.default"), x));
  }
  SECTION("of a gate that is pooled afterwards") {
    const auto y = net.multiply(net.unary("sigmoid.default", net.conv("x", 1)), x);
    net.returns(net.multiply(y, global_pool(net, x)));
  }
  SECTION("of the gate with itself") {
    const auto gate = net.unary("sigmoid.default", x);
    net.returns(net.multiply(gate, gate));
  }
  CHECK(num_replaced(net) == 0);
  check_equal(net, images());
}

TEST_CASE("a gated value stays whose memory is written", "[export]") {
  Network net;
  const auto base = net.unary("silu.default", net.conv("x", 3));
  const auto x = net.call("alias.default", {{"self", tensor(base)}});
  const auto means = global_pool(net, x);
  SECTION("between the pool and the product") {
    net.with("mul_.Tensor", base, 2);
    net.returns(net.multiply(gate_of(net, means), x));
    check_equal(net, images());
  }
  SECTION("behind the product") {
    const auto y = net.multiply(gate_of(net, means), x);
    net.returns(net.add(y, net.with("mul_.Tensor", base, 2)));  // autograd refuses the write
  }
  CHECK(num_replaced(net) == 0);
}

TEST_CASE("a gate of another shape or dtype is multiplied as the program does", "[export]") {
  Network net;
  const auto x = net.unary("silu.default", net.conv("x", 3));
  const auto means = global_pool(net, x);
  SECTION("wider numbers") {
    net.returns(net.multiply(net.unary("sigmoid.default", net.to(means, at::kDouble)), x));
  }
  SECTION("of the whole batch") {
    const auto all = net.call(
        "mean.dim", {{"self", tensor(means)}, {"dim", integers({0})}, {"keepdim", truth(true)}});
    net.returns(net.multiply(x, net.unary("sigmoid.default", all)));
  }
  SECTION("of a video, which has one more dimension") {
    Network video({4, 8, 8, 2});
    const auto frames = video.multiply("x", video.weight({4, 8, 8, 2}));
    const auto gate = video.unary("sigmoid.default", global_pool(video, frames, /*by_mean=*/true));
    video.returns(video.multiply(gate, frames));
    CHECK(num_replaced(video) == 1);
    check_equal(video, at::randn({3, 4, 8, 8, 2}));
    return;
  }
  SECTION("frozen") {
    const auto still = net.unary("detach.default", means);
    net.returns(net.multiply(net.unary("sigmoid.default", still), x));
  }
  CHECK(num_replaced(net) == 1);
  check_equal(net, images());
}

TEST_CASE("a recomputed block with a gate keeps its numbers", "[export]") {
  auto net = gated_network(GENERATE(GateForm{}, timm_gate()));
  net.module("block");
  CHECK(fused(net, {"block"}).at("scale_channels") == 2);
  check_equal(net, images(), {"block"});
}

TEST_CASE("a gate in evaluation keeps its numbers", "[export]") {
  const auto net = gated_network();
  const at::NoGradGuard no_grad;
  auto plain = load(net, {.fuse = false}), replaced = load(net, {.fuse = true});
  CHECK(at::equal(forward(plain, images(), {}), forward(replaced, images(), {})));
}

namespace {

// x times numbers that are drawn for its samples, over the probability that they are 1.
Network stochastic_depth(bool scale_first, const std::string& division) {
  Network net;
  const auto branch = net.norm(net.conv("x", 3));
  const auto probe = net.call(
      "mean.dim", {{"self", tensor("x")}, {"dim", integers({1, 2, 3})}, {"keepdim", truth(true)}});
  const auto drawn = net.call("bernoulli.p", {{"self", tensor(probe)}, {"p", number(0.5)}});
  const auto scale = net.call(division, {{"self", tensor(drawn)}, {"other", number(0.5)}});
  net.returns(net.add(product_of(net, scale, branch, scale_first), branch));
  return net;
}

}  // namespace

TEST_CASE("stochastic depth is replaced, and its numbers stay", "[export]") {
  const auto net = stochastic_depth(GENERATE(false, true), GENERATE("div_.Tensor", "div.Tensor"));
  CHECK(fused(net) == Counts{{"conv2d", 1}, {"batch_norm", 1}, {"scale_samples", 1}});
  check_equal(net, images());
}

TEST_CASE("a product with other numbers than drawn quotients stays", "[export]") {
  const auto net = stochastic_depth(false, "mul.Tensor");
  CHECK(fused(net).count("scale_samples") == 0);
  check_equal(net, images());
}
