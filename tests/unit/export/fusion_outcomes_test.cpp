// SPDX-License-Identifier: Apache-2.0
// Programs whose numbers, shapes and errors must not depend on fusion.
#include "unit/export/fused_network.hpp"

using namespace export_test;

namespace {

/// The output, or the error.
std::string outcome(const Network& net, const at::Tensor& x, bool fuse,
                    const std::vector<std::string>& blocks = {}) {
  try {
    auto module = load(net, {.checkpoint_blocks = blocks, .fuse = fuse});
    at::manual_seed(9);
    const auto output = module->forward(x).toTensor();
    return ddp::concat(output.scalar_type(), output.sizes(), output.to(at::kDouble).sum().item());
  } catch (const std::exception& error) {
    return "an error";
  }
}

void check_outcome(const Network& net, const at::Tensor& x,
                   const std::vector<std::string>& blocks = {}) {
  CHECK(outcome(net, x, false, blocks) == outcome(net, x, true, blocks));
}

/// Gradients of x and the parameters.
std::vector<at::Tensor> gradients(const Network& net, const at::Tensor& x, bool fuse) {
  auto module = load(net, {.fuse = fuse});
  const auto input = x.to(net.type).detach().clone().requires_grad_();
  at::manual_seed(9);
  module->forward(input).toTensor().square().sum().backward();
  std::vector<at::Tensor> all = {input.grad()};
  for (const auto& parameter : module->parameters()) {
    all.push_back(parameter.grad());
  }
  return all;
}

void check_gradients(const Network& net, const at::Tensor& x) {
  const auto plain = gradients(net, x, false), replaced = gradients(net, x, true);
  REQUIRE(plain.size() == replaced.size());
  for (std::size_t i = 0; i < plain.size(); ++i) {
    INFO("tensor " << i << " differs by " << (plain[i] - replaced[i]).abs().max().item());
    CHECK(at::equal(plain[i], replaced[i]));
  }
}

}  // namespace

TEST_CASE("the same with fusion: a size from outside of a checkpointed block", "[export]") {
  Network net({8});
  net.node("torch.ops.aten.sym_size.int", {{"self", tensor("x")}, {"dim", integer(0)}},
           {size_name("batch")});
  const auto first = net.nodes.size();
  const auto y = net.linear_layer("x", 8, 8, true);
  net.returns(net.call("add.Tensor", {{"self", tensor(y)}, {"other", size_name("batch")}}));
  net.module("block", first);
  check_outcome(net, vectors(), {"block"});
}

TEST_CASE("the same with fusion: the order of random draws", "[export]") {
  Network net({8});
  const auto y = net.unary("neg.default", "x");
  const auto a = net.dropout(net.linear_layer("x", 8, 8, true), 0.5);
  const auto b = net.dropout(net.linear_layer(y, 8, 8, true), 0.5);
  net.returns(net.add(b, a));
  check_equal(net, vectors());
}

TEST_CASE("the same with fusion: strides of a sum", "[export]") {
  Network net({8, 8});
  const auto x = net.transpose("x", 1, 2);
  SECTION("with a layer") {
    net.returns(net.view(net.add(net.linear_layer(x, 8, 8, true), x), {-1, 8}));
  }
  SECTION("with a dropped branch") {
    const auto y = net.dropout(net.linear_layer("x", 8, 8, true), 0.5);
    net.returns(net.view(net.add(y, x), {-1, 8}));
  }
  SECTION("before a layer norm") {
    const auto sum = net.add(net.unary("neg.default", "x"), x);
    const auto normed = net.layer_norm(sum, 8);
    net.returns(net.view(net.add(net.unary("neg.default", sum), normed), {-1, 8}));
  }
  check_outcome(net, sequences());
}

TEST_CASE("the same with fusion: strides of a batch norm's sum", "[export]") {
  Network net({4, 4, 4});
  const auto last = net.call("contiguous.default",
                             {{"self", tensor("x")}, {"memory_format", {{"as_memory_format", 2}}}});
  const auto residual = net.unary("neg.default", "x");
  net.returns(net.view(net.relu(net.add(residual, net.norm(last))), {-1, 64}));
  check_outcome(net, at::randn({3, 4, 4, 4}));
}

TEST_CASE("the same with fusion: a sum whose flattened rows are written", "[export]") {
  Network net({8, 8});
  const auto other = net.transpose("x", 1, 2);
  const auto sum = net.add(net.linear_layer("x", 8, 8, true), other);
  SECTION("that may be a view") {
    net.with("mul_.Tensor", net.flatten(sum), 2);
    net.returns(net.unary("neg.default", sum));
  }
  SECTION("that are a view") {
    net.returns(net.unary("relu_.default", net.view(sum, {-1, 8})));
  }
  CHECK(fused(net) == Counts{{"linear", 1}});
  check_gradients(net, sequences());
}

TEST_CASE("the same with fusion: images whose flattened pixels are written", "[export]") {
  Network net;
  auto x = net.conv("x", 3);
  SECTION("themselves") {}
  SECTION("behind a norm") {
    x = net.relu(net.norm(x));
  }
  SECTION("behind an operator that keeps their strides") {
    x = net.unary("silu.default", x);
  }
  net.with("mul_.Tensor", net.flatten(x), 2);
  net.returns(net.unary("neg.default", x));
  CHECK(fused(net).empty());
  check_outcome(net, images());
}

TEST_CASE("the same with fusion: images that are written before they are flattened", "[export]") {
  Network net;
  const auto x = net.relu(net.conv("x", 3), /*in_place=*/true);
  net.returns(net.flatten(x, 1));
  CHECK(fused(net) == Counts{{"conv2d", 1}});
  check_equal(net, images());
}

TEST_CASE("the same with fusion: a mean over a sum of two orders in memory", "[export]") {
  Network net({64, 32});
  const auto other = net.linear_layer(net.transpose("x", 1, 2), 64, 64, true);
  const auto branch = net.dropout(net.linear_layer("x", 32, 32, true), 0.0);
  const auto residual = net.transpose(other, 1, 2);
  const bool branch_first = GENERATE(false, true);
  const auto sum = branch_first ? net.add(branch, residual) : net.add(residual, branch);
  net.returns(net.call("mean.dim", {{"self", tensor(sum)}, {"dim", integers({1})}}));
  CHECK(fused(net).at("add_branch") == 1);
  at::manual_seed(2);
  check_equal(net, at::randn({3, 64, 32}));
}

TEST_CASE("the same with fusion: multi-head attention whose memory is written", "[export]") {
  MultiheadOptions options;
  options.written = GENERATE("result", "input");
  const auto net = multihead_attention(options);
  CHECK(fused(net).count("multihead_attention") == 0);
  check_outcome(net, sequences());
}

TEST_CASE("the same with fusion: gradients of a bf16 value and its float32", "[export]") {
  Network net({8, 8}, at::kBFloat16);
  const auto x = net.linear_layer("x", 8, 8, false);
  const auto [normed, wide] = net.rms_norm(x, 8);
  net.returns(net.add(net.unary("neg.default", normed), net.unary("sin.default", wide)));
  check_gradients(net, sequences() * 3);
}

TEST_CASE("the same with fusion: a layer of a transposed bf16 input", "[export]") {
  Network net({8, 8}, at::kBFloat16);
  net.returns(net.linear_layer(net.transpose("x", 1, 2), 8, 8, true));
  check_equal(net, sequences() * 3);
}

TEST_CASE("the same with fusion: a layer of a transposed float32 input", "[export]") {
  Network net({33, 7});
  net.returns(net.linear_layer(net.transpose("x", 1, 2), 17, 33, true));
  at::manual_seed(2);
  check_equal(net, at::randn({3, 33, 7}));
}

TEST_CASE("the same with fusion: a weight of two layers under autocast", "[export]") {
  Network net({8});
  const auto w = net.weight({8, 8});
  const auto linear = [&](const std::string& x) {
    return net.call("linear.default", {{"input", tensor(x)}, {"weight", tensor(w)}});
  };
  net.returns(
      net.add(linear("x"), net.unary("sin.default", linear(net.unary("cos.default", "x")))));
  const auto autocast = autocast_on(at::kCPU);
  auto plain = load(net, {}), replaced = load(net, {.fuse = true});
  for (auto* module : {&plain, &replaced}) {
    (*module)->forward(vectors()).toTensor().to(at::kFloat).square().sum().backward();
    at::autocast::clear_cache();
  }
  CHECK(at::equal(plain->parameters()[0].grad(), replaced->parameters()[0].grad()));
}

TEST_CASE("the same with fusion: a label outside of the vocabulary", "[export]") {
  Loss loss(at::kFloat);
  loss.labels =
      loss.net.call("add.Tensor", {{"self", tensor(loss.labels)}, {"other", integer(1)}});  // 8 too
  loss.returns_loss(loss.net.view(loss.logits(), {-1, 8}));
  CHECK(fused(loss.net) == Counts{{"linear_cross_entropy", 1}});
  CHECK(outcome(loss.net, sequences(), true) == "an error");
  check_outcome(loss.net, sequences());
}

TEST_CASE("the same with fusion: an image of integers", "[export]") {
  Network net;
  net.returns(net.conv("x", 3));
  check_outcome(net, (images() * 10).to(at::kLong));
}

TEST_CASE("the same with fusion: a stem's image of integers", "[export]") {
  Network net({3, 8, 8});
  net.returns(net.call("conv2d.default", {{"input", tensor("x")},
                                          {"weight", tensor(net.weight({4, 3, 3, 3}))},
                                          {"bias", {{"as_none", Json::array()}}},
                                          {"stride", integers({1, 1})},
                                          {"padding", integers({1, 1})}}));
  check_outcome(net, (at::randn({3, 3, 8, 8}) * 10).to(at::kByte));
}

TEST_CASE("the same with fusion: a float32 image and a float64 filter", "[export]") {
  Network net({4, 8, 8}, at::kDouble);
  net.returns(net.conv("x", 3));
  check_outcome(net, images());
}

TEST_CASE("the same with fusion: the order of a sum of gradients", "[export]") {
  SECTION("of a moved layer's input") {
    Network net({8});
    const auto x = net.unary("neg.default", "x");
    const auto y = net.linear_layer(x, 8, 8, true);
    const auto z = net.unary("sin.default", x);
    net.returns(net.add(net.unary("neg.default", z), net.add(y, x)));
    check_gradients(net, vectors());
  }
  SECTION("of a weight") {
    Network net({8});
    const auto w = net.weight({8, 8});
    const auto linear = [&](const std::string& x) {
      return net.call("linear.default", {{"input", tensor(x)}, {"weight", tensor(w)}});
    };
    const auto a = linear("x"), b = net.unary("sin.default", linear(net.unary("cos.default", "x")));
    const auto c = net.unary("cos.default", linear(net.unary("sin.default", "x")));
    net.returns(net.add(net.unary("neg.default", net.add(b, c)), a));
    check_gradients(net, vectors());
  }
  SECTION("of a composed gelu with its half behind") {
    Network net({8});
    const auto x = net.unary("neg.default", "x");
    const auto cube = net.with("pow.Tensor_Scalar", x, 3.0, "exponent");
    const auto sum = net.add(x, net.with("mul.Tensor", cube, 0.044715));
    const auto tanh = net.unary("tanh.default", net.with("mul.Tensor", sum, 0.7978845608028654));
    const auto plus = net.with("add.Tensor", tanh, 1.0);
    net.returns(net.multiply(net.with("mul.Tensor", x, 0.5), plus));
    check_gradients(net, vectors());
  }
}

TEST_CASE("the same with fusion: a buffer that is another one's memory", "[export]") {
  Network net;
  const auto memory = net.statistics(at::ones({3, 4, 8, 8}));
  const auto same = net.statistics(at::ones({3, 4, 8, 8}));
  const auto name = [](const std::string& value) { return value.substr(2); };
  net.weights[name(same)]["path_name"] = net.weights[name(memory)]["path_name"];
  const auto normed = net.norm(same);
  net.call("copy_.default", {{"self", tensor(memory)}, {"src", tensor("x")}});
  net.returns(net.relu(normed));
  check_outcome(net, images());
}

TEST_CASE("the same with fusion: a mask that is not true because a sum overflows", "[export]") {
  Network net({2, 8, 8});
  const auto range =
      net.call("arange.default", {{"end", integer(8)}, {"dtype", {{"as_scalar_type", 5}}}});
  const auto sum =
      net.call("add.Tensor", {{"self", tensor(range)}, {"other", integer(9223372036854775803)}});
  const auto mask = net.with("ge.Scalar", sum, 0);
  net.returns(net.attend("x", "x", "x", {{"attn_mask", tensor(mask)}}));
  check_outcome(net, tokens());
}

TEST_CASE("the same with fusion: causality that a value of the graph says", "[export]") {
  Network net({2, 8, 8});
  net.node("torch.ops.aten.sym_size.int", {{"self", tensor("x")}, {"dim", integer(0)}},
           {size_name("batch")});
  net.node("_operator.ge", {{"", size_name("batch")}, {"", integer(1)}},
           {{{"as_sym_bool", {{"as_name", "yes"}}}}});
  net.returns(net.attend("x", "x", "x", {{"is_causal", {{"as_sym_bool", {{"as_name", "yes"}}}}}}));
  check_outcome(net, tokens());
}

TEST_CASE("the same with fusion: a bias that is a number", "[export]") {
  Network net({8}, at::kDouble);
  net.returns(net.call(
      "linear.default",
      {{"input", tensor("x")}, {"weight", tensor(net.weight({8, 8}))}, {"bias", number(2)}}));
  check_outcome(net, vectors().to(at::kDouble));
}

TEST_CASE("the same with fusion: a name that a second result gets", "[export]") {
  Network net;
  const auto y = net.relu(net.norm("x"));
  const auto a = net.unary("neg.default", y);
  net.node("torch.ops.aten.neg.default", {{"self", tensor(y)}}, {tensor(y + ".fork")});
  net.returns(net.add(a, y + ".fork"));
  check_outcome(net, images());
}

TEST_CASE("the same with fusion: an evaluation that is not checked", "[export]") {
  Network net({8});
  net.returns(net.linear_layer("x", 8, 8, true));
  Network eval({8});
  const auto y = eval.call("linear.default", {{"input", tensor("x")},
                                              {"weight", tensor(eval.weight({8, 8}))},
                                              {"bias", tensor(eval.weight({8}))},
                                              {"unknown", integer(1)}});
  eval.returns(y);
  net.evaluation(eval);
  check_outcome(net, vectors());  // the error must come at the load
}

TEST_CASE("the same with fusion: a search without end", "[export]") {
  Network net({2, 8, 8});
  net.returns(net.unary("neg.default", "x"));
  Network eval({2, 8, 8});
  eval.node("torch.ops.aten.alias.default", {{"self", tensor("loop")}}, {tensor("loop")});
  eval.returns(eval.attend("x", "x", "x", {{"attn_mask", tensor("loop")}}));
  net.evaluation(eval);
  CHECK(outcome(net, tokens(), false) == "an error");
  CHECK(outcome(net, tokens(), true) == "an error");
}
