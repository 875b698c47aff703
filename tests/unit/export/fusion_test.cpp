// SPDX-License-Identifier: Apache-2.0
// Which chains ddp::ops replace, and that the numbers stay. (The ops' own tests compare them with
// LibTorch's operators on CUDA.)
#include "unit/export/fused_network.hpp"

using namespace export_test;

TEST_CASE("a residual network's chains are replaced, and its numbers stay", "[export]") {
  const auto net = residual_network();
  CHECK(fused(net) == Counts{{"conv2d", 6},
                             {"batch_norm_relu_max_pool", 1},
                             {"batch_norm_relu", 2},
                             {"batch_norm_add_relu", 2},
                             {"pooled_linear", 1}});
  check_equal(net, images());
}

TEST_CASE("a chain whose inside somebody reads stays", "[export]") {
  SECTION("as a result of the program") {
    Network net;
    const auto normed = net.norm("x");
    net.relu(normed);
    CHECK(fused(net.returns(normed)) == Counts{{"batch_norm", 1}});
  }
  SECTION("a second reader") {
    Network net;
    const auto normed = net.norm("x");
    net.returns(net.add(net.relu(normed), normed));
    CHECK(fused(net) == Counts{{"batch_norm", 1}});
    check_equal(net, images());
  }
  SECTION("both operands of the sum") {
    Network net;
    const auto normed = net.norm("x");
    net.returns(net.relu(net.add(normed, normed)));
    CHECK(fused(net) == Counts{{"batch_norm", 1}});
  }
}

TEST_CASE("a chain stays that would run behind another write or read of its memory", "[export]") {
  SECTION("its input is overwritten through a view") {
    Network net;
    const auto x = net.call("neg.default", {{"self", tensor("x")}});
    const auto view = net.call("alias.default", {{"self", tensor(x)}});
    const auto normed = net.norm(x);
    const auto written = net.call("mul_.Tensor", {{"self", tensor(view)}, {"other", number(2)}});
    net.returns(net.add(net.relu(normed), written));
    CHECK(fused(net) == Counts{{"batch_norm", 1}});
  }
  SECTION("another norm has the same running estimates") {
    Network net;
    const auto mean = net.statistics(at::zeros({4}));
    const auto normed = net.norm("x", mean);
    const auto second = net.norm("x", mean);
    net.returns(net.add(net.relu(normed), second));
    CHECK(fused(net) == Counts{{"batch_norm", 2}});
    check_equal(net, images());
  }
  SECTION("but a counter's increment may stand between") {
    Network net;
    const auto count = net.statistics(at::zeros({}, at::kLong));
    const auto normed = net.norm("x");
    net.call("add_.Tensor", {{"self", tensor(count)}, {"other", integer(1)}});
    net.returns(net.relu(normed));
    CHECK(fused(net) == Counts{{"batch_norm_relu", 1}});
    check_equal(net, images());
  }
}

TEST_CASE("two norms of a sum run in the program's order", "[export]") {
  SECTION("where one reads what the other writes, they stay") {
    Network net;
    const auto mean = net.statistics(at::zeros({4}));
    const auto first = net.norm("x", mean);
    const auto second = net.norm("x", "", true, mean);
    const bool swapped = GENERATE(false, true);
    net.returns(net.relu(swapped ? net.add(second, first) : net.add(first, second)));
    CHECK(fused(net) == Counts{{"batch_norm", 2}});
    check_equal(net, images());
  }
  SECTION("where they share their input, its gradients are summed in that order") {
    Network net;
    const auto x = net.unary("sin.default", net.conv("x", 1));
    const auto first = net.norm(x), second = net.norm(x);
    const bool swapped = GENERATE(false, true);
    const auto y = net.relu(swapped ? net.add(second, first) : net.add(first, second));
    net.returns(net.add(y, net.unary("tanh.default", x)));
    CHECK(fused(net) == Counts{{"batch_norm_add_relu", 1}, {"conv2d", 1}});
    check_equal(net, images());
  }
}

TEST_CASE("gradients of a value are summed in the program's order", "[export]") {
  SECTION("behind a dropout that drops nothing") {
    Network net({8});
    const bool trains = GENERATE(false, true);
    const auto x = net.unary("sin.default", net.linear_layer("x", 8, 8, false));
    const auto same = net.dropout(x, trains ? 0.0 : 0.5, trains);
    const auto silu = net.unary("silu.default", x);
    const auto other = net.unary("exp.default", same);
    net.returns(net.add(net.multiply(silu, other), net.unary("tanh.default", x)));
    CHECK(fused(net).count("swiglu") == 0);
    check_equal(net, vectors());
  }
  SECTION("behind a dropout in place") {
    Network net({8});
    const bool trains = GENERATE(false, true);
    const auto x = net.unary("sin.default", net.linear_layer("x", 8, 8, false));
    const auto same =
        net.call("dropout_.default", {{"self", tensor(net.linear_layer(x, 8, 8, true))},
                                      {"p", number(trains ? 0.0 : 0.5)},
                                      {"train", truth(trains)}});
    net.returns(net.linear_layer(same, 8, 8, true));
    CHECK(fused(net) == Counts{{"linear", 3}});
    check_equal(net, vectors());
  }
  SECTION("of a copy that RMSNorm computes with") {
    Network net({8});
    const auto x = net.unary("sin.default", net.linear_layer("x", 8, 8, false));
    const auto wide =
        net.call("to.dtype",
                 {{"self", tensor(x)}, {"dtype", dtype_name(at::kFloat)}, {"copy", truth(true)}});
    const auto square = net.with("pow.Tensor_Scalar", wide, 2, "exponent");
    const auto mean = net.call(
        "mean.dim", {{"self", tensor(square)}, {"dim", integers({-1})}, {"keepdim", truth(true)}});
    const auto scaled =
        net.multiply(wide, net.unary("rsqrt.default", net.with("add.Tensor", mean, 1e-5)));
    const auto normed = net.multiply(net.weight({8}), net.to(scaled, at::kFloat));
    net.returns(net.add(normed, net.unary("exp.default", x)));
    CHECK(fused(net).count("rms_norm") == 0);
    check_equal(net, vectors());
  }
}

TEST_CASE("views that a schema does not name are views", "[export]") {
  Network net({8});
  const auto x = net.with("mul.Tensor", "x", 1.5);
  const auto flat =
      net.call("flatten_dense_tensors.default", {{"tensors", {{"as_tensors", {{{"name", x}}}}}}});
  const auto frozen = net.statistics(at::eye(8));
  const auto product =
      net.call("linear.default", {{"input", tensor(x)}, {"weight", tensor(frozen)}});
  net.call("mul_.Tensor", {{"self", tensor(flat)}, {"other", number(0.5)}});
  net.returns(net.add(product, net.weight({3, 8})));
  CHECK(fused(net).count("add_branch") == 0);
  check_equal(net, vectors());
}

TEST_CASE("sums that the op does not compute", "[export]") {
  SECTION("with a factor") {
    Network net;
    net.returns(net.relu(net.add(net.norm("x"), "x", false, 2)));
    CHECK(fused(net) == Counts{{"batch_norm", 1}});
    check_equal(net, images());
  }
  SECTION("into the residual's own memory") {
    Network net;
    const auto y = net.relu("x");
    net.returns(net.add(net.relu(net.add(y, net.norm("x"), true)), y));
    CHECK(fused(net) == Counts{{"batch_norm", 1}});
    check_equal(net, images());
  }
  SECTION("of a residual of another shape") {
    Network net;
    const auto mean = net.call(
        "mean.dim", {{"self", tensor("x")}, {"dim", integers({2, 3})}, {"keepdim", truth(true)}});
    net.returns(net.relu(net.add(net.norm("x"), mean)));
    CHECK(fused(net) == Counts{{"batch_norm_add_relu", 1}});
    check_equal(net, images());
  }
}

TEST_CASE("a network with silu keeps its numbers", "[export]") {
  const auto net = silu_network();
  CHECK(fused(net) == Counts{{"conv2d", 3}, {"batch_norm_silu", 2}, {"batch_norm", 1}});
  check_equal(net, images());
}

TEST_CASE("batch norms alone and with silu", "[export]") {
  Network net;
  SECTION("whose value somebody else reads") {
    const auto normed = net.norm("x");
    net.returns(net.add(net.unary("silu.default", normed), normed));
    CHECK(fused(net) == Counts{{"batch_norm", 1}});
  }
  SECTION("of a gate, which swiglu takes") {
    const auto gate = net.unary("silu.default", net.norm("x"));
    net.returns(net.multiply(gate, net.norm("x")));
    CHECK(fused(net) == Counts{{"batch_norm", 2}, {"swiglu", 1}});
  }
  SECTION("whose input is written before silu") {
    const auto x = net.unary("neg.default", "x");
    const auto normed = net.norm(x);
    const auto written = net.with("mul_.Tensor", x, 2);
    net.returns(net.add(net.unary("silu.default", normed), written));
    CHECK(fused(net) == Counts{{"batch_norm", 1}});
    return;  // autograd refuses the write
  }
  SECTION("in evaluation") {
    const auto y = net.unary("silu_.default", net.norm("x", "", /*training=*/false));
    net.returns(net.norm(y, "", /*training=*/false));
    CHECK(fused(net) == Counts{{"batch_norm", 1}, {"batch_norm_silu", 1}});
  }
  SECTION("of a sequence, which the op does not take") {
    Network sequence({4, 8});
    sequence.returns(sequence.norm(sequence.unary("silu.default", sequence.norm("x"))));
    CHECK(fused(sequence) == Counts{{"batch_norm", 1}, {"batch_norm_silu", 1}});
    check_equal(sequence, images().select(3, 0));
    return;
  }
  check_equal(net, images());
}

TEST_CASE("a result with two readers is forked, unless one of them is a view", "[export]") {
  const bool by_view = GENERATE(false, true);
  Network net;
  const auto y = net.relu(net.norm("x"));
  const auto z = net.call(by_view ? "alias.default" : "neg.default", {{"self", tensor(y)}});
  net.returns(net.add(z, y));
  auto program = ddp::detail::read_program(net.program().dump());
  CHECK(ddp::detail::fuse(program) == Counts{{"batch_norm_relu", 1}});
  CHECK(program.graph.nodes[0].outputs.size() == (by_view ? 1 : 2));
  check_equal(net, images());
}

TEST_CASE("a chain stays whose operand is a view of a buffer that is then written", "[export]") {
  Network net;
  const auto memory = net.statistics(at::ones({3, 4, 8, 8}));
  const auto view = net.call("alias.default", {{"self", tensor(memory)}});
  const auto normed = net.norm(view);
  net.call("copy_.default", {{"self", tensor(memory)}, {"src", tensor("x")}});
  net.returns(net.relu(normed));
  CHECK(fused(net) == Counts{{"batch_norm", 1}});
}

TEST_CASE("two norms of one sum keep the order of their running estimates", "[export]") {
  Network net;
  const auto mean = net.statistics(at::zeros({4}));
  const auto second = net.norm(net.conv("x", 1), mean);
  net.returns(net.relu(net.add(net.norm("x", mean), second)));
  const auto counts = fused(net);
  CHECK(counts.count("batch_norm_add_relu") == 0);
  check_equal(net, images());
}

TEST_CASE("a sum with a number stays", "[export]") {
  Network net;
  net.node("torch.ops.aten.sym_size.int", {{"self", tensor("x")}, {"dim", integer(0)}},
           {size_name("batch")});
  net.returns(net.relu(
      net.call("add.Tensor", {{"self", tensor(net.norm("x"))}, {"other", size_name("batch")}})));
  CHECK(fused(net) == Counts{{"batch_norm", 1}});
  check_equal(net, images());
}

TEST_CASE("a sum in place keeps its dtype, another one promotes", "[export]") {
  const bool in_place = GENERATE(false, true);
  Network net;
  const auto wide = net.to("x", at::kDouble);
  net.returns(net.relu(net.add(net.norm("x"), wide, in_place)));
  CHECK(fused(net) == Counts{{"batch_norm_add_relu", 1}});
  const auto output = train(net, images(), {.fuse = true})[0];
  CHECK(output.scalar_type() == (in_place ? at::kFloat : at::kDouble));
  check_equal(net, images());
}

TEST_CASE("a result read by a dropout, which may return it, is not forked", "[export]") {
  Network net;
  const auto y = net.relu(net.norm("x"));
  const auto z =
      net.call("dropout.default", {{"input", tensor(y)}, {"p", number(0)}, {"train", truth(true)}});
  net.returns(net.add(z, y));
  auto program = ddp::detail::read_program(net.program().dump());
  ddp::detail::fuse(program);
  CHECK(program.graph.nodes[0].outputs.size() == 1);
}

TEST_CASE("convolutions that the op does not compute stay", "[export]") {
  Network net;
  Inputs arguments = {{"input", tensor("x")}, {"weight", tensor(net.weight({4, 4, 3, 3}))}};
  SECTION("with a bias") {
    arguments.push_back({"bias", tensor(net.weight({4}))});
  }
  SECTION("in groups") {
    arguments.push_back({"groups", integer(2)});
  }
  SECTION("dilated") {
    arguments.push_back({"dilation", integers({2, 2})});
  }
  SECTION("with two strides") {
    arguments.push_back({"stride", integers({1, 2})});
  }
  SECTION("with two paddings") {
    arguments.push_back({"padding", integers({1, 0})});
  }
  net.returns(net.call("conv2d.default", arguments));
  CHECK(fused(net).empty());
}

TEST_CASE("convolutions of an image of three channels", "[export]") {
  Network net({3, 8, 8});
  const auto [kernel, stride, padding] =
      GENERATE(std::tuple(7, 2, 3), std::tuple(3, 1, 1), std::tuple(3, 2, 1), std::tuple(7, 2, 2),
               std::tuple(5, 1, 2), std::tuple(3, 1, 0), std::tuple(1, 1, 0), std::tuple(1, 2, 1));
  net.returns(net.call("conv2d.default", {{"input", tensor("x")},
                                          {"weight", tensor(net.weight({4, 3, kernel, kernel}))},
                                          {"stride", integers({stride, stride})},
                                          {"padding", integers({padding, padding})}}));
  CHECK(fused(net) == Counts{{"conv2d", 1}});
  check_equal(net, images(3));
}

TEST_CASE("patches of an image are a convolution with a bias", "[export]") {
  Network net({3, 8, 8});
  net.returns(net.patches("x", GENERATE(2, 3)));
  CHECK(fused(net) == Counts{{"conv2d", 1}});
  check_equal(net, images(3));
}

TEST_CASE("pools and heads that the op does not compute stay", "[export]") {
  Network net;
  SECTION("a max pool of 2") {
    net.returns(net.pool(net.relu(net.norm("x")), 2));
    CHECK(fused(net) == Counts{{"batch_norm_relu", 1}});
  }
  SECTION("a max pool that rounds up") {
    net.returns(net.pool(net.relu(net.norm("x")), 3, true));
    CHECK(fused(net) == Counts{{"batch_norm_relu", 1}});
  }
  SECTION("a mean of 2 x 2 pixels") {
    net.returns(net.head("x", 2));
    CHECK(fused(net) == Counts{{"linear", 1}});
  }
  SECTION("a head of each channel") {
    net.returns(net.head("x", 1, 2));
    CHECK(fused(net) == Counts{{"linear", 1}});
  }
  check_equal(net, images());
}

TEST_CASE("a chain stays whose input may be the tensor that another one writes", "[export]") {
  Network net;
  net.input("y", {symbol("s0"), integer(4), integer(8), integer(8)});
  const auto normed = net.norm("x");
  net.with("mul_.Tensor", "y", 2);
  net.returns(net.relu(normed));
  CHECK(fused(net) == Counts{{"batch_norm", 1}});
}

TEST_CASE("nothing is fused if a buffer is a view of another", "[export]") {
  Network net({4});
  net.buffer("all", at::ones({3, 4})).buffer("some", at::ones({4}));
  net.weights["some"]["path_name"] = net.weights["all"]["path_name"];
  const auto sum = net.add("x", "b_some");
  const auto branch = net.linear_layer(sum, 4, 4, true);
  net.with("add_.Tensor", "b_all", 1);
  net.returns(net.add("b_some", branch));
  check_equal(net, vectors().slice(1, 0, 4));
}

TEST_CASE("a view of a fused result takes any strides", "[export]") {
  Network net;
  const auto flat = net.view(net.relu(net.norm(net.conv("x", 1))), {-1, 256});
  net.returns(net.linear_layer(flat, 3, 256, true));
  auto program = ddp::detail::read_program(net.program().dump());
  ddp::detail::fuse(program);
  CHECK(program.graph.nodes[2].target == "torch.ops.aten.reshape.default");
  check_equal(net, images());
}

TEST_CASE("an overridden operator is called as the export has it", "[export]") {
  const auto net = residual_network();
  auto module = load(net, {.fuse = true});
  module->forward(images());
  int calls = 0;
  module->override_operator("aten::batch_norm", [&](std::vector<c10::IValue>& stack, bool) {
    ++calls;
    stack = {stack[0]};
  });
  module->forward(images());
  CHECK(calls == 6);
}
