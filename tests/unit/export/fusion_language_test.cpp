// SPDX-License-Identifier: Apache-2.0
// Which chains of transformers ddp::ops replace, and that the numbers stay.
#include "unit/export/fused_network.hpp"

using namespace export_test;

TEST_CASE("a block of GPT-2 is replaced, and its numbers stay", "[export]") {
  const double dropout_p = GENERATE(0.0, 0.1);
  const auto net = gpt2_block(dropout_p, GENERATE(at::kFloat, at::kDouble, at::kBFloat16));
  Counts expected = {{"layer_norm", 1}, {"attention", 1}, {"add_layer_norm", 2}, {"gelu", 1}};
  if (dropout_p > 0) {
    expected["dropout"] = 1;
  }
  CHECK(fused(net) == expected);
  check_equal(net, tokens());
}

TEST_CASE("a block of Llama is replaced, and its numbers stay", "[export]") {
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);
  const auto net = llama_block(dtype);
  CHECK(fused(net) == Counts{{"rms_norm", 2},
                             {"apply_rotary", 1},
                             {"attention", 1},
                             {"add_branch", 2},
                             {"swiglu", 1},
                             {"linear", 3}});
  check_equal(net, tokens());
}

TEST_CASE("a sum that is read again after its layer norm comes from the op", "[export]") {
  Network net({8});
  const auto sum = net.add(net.linear_layer("x", 8, 8, true), "x");
  const auto normed = net.layer_norm(sum, 8);
  SECTION("that are plain") {
    net.returns(net.add(net.unary("neg.default", normed), net.unary("neg.default", sum)));
    CHECK(fused(net) == Counts{{"add_layer_norm", 1}});
  }
  SECTION("but not for views") {
    net.returns(net.add(net.unary("neg.default", normed), net.unary("alias.default", sum)));
    CHECK(fused(net) == Counts{{"layer_norm", 1}, {"add_branch", 1}});
  }
  SECTION("nor for writes") {
    net.returns(net.add(net.unary("neg.default", normed), net.with("add_.Tensor", sum, 1)));
    CHECK(fused(net) == Counts{{"layer_norm", 1}, {"add_branch", 1}});
    return;  // PyTorch refuses its backward
  }
  SECTION("nor for the caller") {
    net.output(tensor(sum));
    net.returns(normed);
    CHECK(fused(net) == Counts{{"layer_norm", 1}, {"add_branch", 1}});
    return;  // two results
  }
  check_equal(net, vectors());
}

TEST_CASE("a sum stays that something reads before the layer norm", "[export]") {
  Network net({8});
  const auto sum = net.add("x", net.linear_layer("x", 8, 8, true));
  const auto before = net.unary("neg.default", sum);
  net.returns(net.add(net.unary("neg.default", net.layer_norm(sum, 8)), before));
  CHECK(fused(net) == Counts{{"layer_norm", 1}, {"add_branch", 1}});
  check_equal(net, vectors());
}

TEST_CASE("the input of a layer norm is passed on to its second reader", "[export]") {
  Network net({8});
  const auto x = net.unary("neg.default", "x");
  const auto normed = net.unary("neg.default", net.layer_norm(x, 8));
  const bool by_view = GENERATE(false, true);
  net.returns(net.add(normed, net.unary(by_view ? "alias.default" : "abs.default", x)));
  auto program = ddp::detail::read_program(net.program().dump());
  CHECK(ddp::detail::fuse(program) == Counts{{"layer_norm", 1}});
  CHECK(program.graph.nodes[1].outputs.size() == (by_view ? 1 : 2));
  check_equal(net, vectors());
}

TEST_CASE("sums of a branch that the op does not compute", "[export]") {
  Network net({2, 8, 8});
  const auto branch = net.dropout(net.linear_layer(net.unary("neg.default", "x"), 8, 8, true), 0.0);
  const auto row = [&] {
    return net.call("mean.dim",
                    {{"self", tensor("x")}, {"dim", integers({2})}, {"keepdim", truth(true)}});
  };
  SECTION("with a residual of another shape") {
    net.returns(net.add(branch, row()));
    CHECK(fused(net) == Counts{{"add_branch", 1}});
  }
  SECTION("with a residual of another shape, before a layer norm") {
    net.returns(net.layer_norm(net.add(branch, row()), 8));
    CHECK(fused(net) == Counts{{"add_layer_norm", 1}});
  }
  SECTION("with a residual of another dtype") {
    const auto wide = net.to("x", at::kDouble);
    net.returns(net.add(wide, branch));
    CHECK(fused(net) == Counts{{"add_branch", 1}});
  }
  SECTION("with a factor") {
    net.returns(net.add(branch, "x", false, 2));
    CHECK(fused(net) == Counts{{"linear", 1}});
  }
  SECTION("in place") {
    net.returns(net.add(branch, "x", true));
    CHECK(fused(net) == Counts{{"linear", 1}});
  }
  SECTION("with all values dropped") {
    net.returns(net.add(net.dropout(branch, 1.0), "x"));
    CHECK(fused(net) == Counts{{"add_branch", 1}, {"linear", 1}});
  }
  check_equal(net, tokens());
}

TEST_CASE("a residual in the sizes of a layer's view is added to its product", "[export]") {
  Network net({2, 8, 8});
  const auto heads =
      net.view(net.linear_layer(net.unary("neg.default", "x"), 8, 8, true), {-1, 2, 8, 8, 1});
  const auto residual = net.unary_at("unsqueeze.default", "x", 4);
  net.returns(net.add(residual, heads));
  CHECK(fused(net) == Counts{{"add_branch", 1}});
  check_equal(net, tokens());
}

TEST_CASE("a dropout of an evaluation drops nothing", "[export]") {
  Network net({2, 8, 8});
  const auto branch = net.dropout(net.linear_layer(net.unary("neg.default", "x"), 8, 8, true), 0.5,
                                  /*train=*/false);
  const bool is_normed = GENERATE(false, true);
  const auto sum = net.add(branch, net.dropout("x", 0.5, /*train=*/false));
  net.returns(is_normed ? net.layer_norm(sum, 8) : sum);
  CHECK(fused(net) == Counts{{is_normed ? "add_layer_norm" : "add_branch", 1}});
  check_equal(net, tokens());
}

TEST_CASE("a composed gelu", "[export]") {
  Network net({2, 8, 8});
  const auto x = net.linear_layer("x", 8, 8, true);
  SECTION("with another constant is something else") {
    net.returns(net.composed_gelu(x, 0.044));
    CHECK(fused(net) == Counts{{"linear", 1}});
  }
  SECTION("leaves the layer alone whose result somebody reads") {
    net.returns(net.add(net.unary("neg.default", net.composed_gelu(x)), x));
    CHECK(fused(net) == Counts{{"linear", 1}, {"gelu", 1}});
  }
  check_equal(net, tokens());
}

TEST_CASE("a composed RMSNorm", "[export]") {
  Network net({2, 8, 8}, GENERATE(at::kFloat, at::kDouble, at::kBFloat16));
  SECTION("with another power is something else") {
    net.returns(net.rms_norm("x", 8, 4).first);
    CHECK(fused(net).empty());
  }
  SECTION("over another dimension is something else") {
    net.returns(net.rms_norm("x", 8, 2, /*dim_of_mean=*/2).first);
    CHECK(fused(net).empty());
  }
  SECTION("beside a region without gradients") {
    ArchiveBuilder region;
    region.input("v", {}).node("torch.ops.aten.sin.default", {{"self", tensor("v")}},
                               {tensor("s")});
    region.output(tensor("s"));
    const std::string written = GENERATE("nothing", "s", "v");
    if (written != "nothing") {
      region.node("torch.ops.aten.neg_.default", {{"self", tensor(written)}}, {tensor("n")});
    }
    const auto x = net.unary("neg.default", "x");
    net.node("torch.ops.higher_order.wrap_with_set_grad_enabled",
             {{"", truth(false)}, {"", graph_argument(region)}, {"", tensor(x)}},
             {tensor("inside")});
    net.returns(net.add(net.rms_norm(x, 8).first, "inside"));
    CHECK(fused(net).count("rms_norm") == (written == "v" ? 0 : 1));
  }
  SECTION("keeps its float32 for another reader") {
    const auto [normed, wide] = net.rms_norm("x", 8);
    net.returns(net.add(net.unary("neg.default", normed), net.unary("neg.default", wide)));
    CHECK(fused(net) == Counts{{"rms_norm", 1}});
  }
  check_equal(net, tokens());
}

TEST_CASE("a product of rows", "[export]") {
  Network net({8});
  const auto product = [&](const std::vector<int64_t>& bias, int64_t factor) {
    net.returns(net.call("addmm.default", {{"self", tensor(net.weight(bias))},
                                           {"mat1", tensor("x")},
                                           {"mat2", tensor(net.weight({8, 4}))},
                                           {"beta", integer(factor)}}));
  };
  SECTION("with a factor stays") {
    product({4}, 2);
    CHECK(fused(net).empty());
  }
  SECTION("plus a bias that broadcasts is LibTorch's") {
    product({3, 1}, 1);
    CHECK(fused(net) == Counts{{"linear", 1}});
  }
  check_equal(net, vectors());
}

TEST_CASE("a mask that masks nothing is left out", "[export]") {
  Network net({2, 8, 8});
  const auto range = net.call("arange.default", {{"end", integer(8)}});
  double start = 0, least = 0;
  bool is_written = false;
  SECTION("arange(8) >= 0") {}
  SECTION("not arange(8) - 3 >= 0") {
    start = -3;
  }
  SECTION("not arange(8) >= 1") {
    least = 1;
  }
  SECTION("not one that is written") {
    is_written = true;
  }
  const auto positions = net.with("add.Tensor", range, start);
  const auto columns = net.unary_at("unsqueeze.default", positions, 0);
  if (is_written) {
    net.with("sub_.Tensor", positions, 2);
  }
  const auto mask = net.call(
      "expand.default",
      {{"self", tensor(net.with("ge.Scalar", columns, least))}, {"size", integers({8, 8})}});
  const auto query = net.linear_layer("x", 8, 8, false);
  net.returns(net.attend(query, "x", "x", {{"attn_mask", tensor(mask)}}));
  const bool is_all_true = start == 0 && least == 0 && !is_written;
  CHECK(fused(net).count("attention") == (is_all_true ? 1 : 0));
  const auto plain = train(net, tokens(), {}), replaced = train(net, tokens(), {.fuse = true});
  CHECK(at::allclose(plain[0], replaced[0]));  // another kernel of LibTorch without a mask
}

TEST_CASE("attention's options", "[export]") {
  Network net({2, 8, 8});
  const auto query = net.linear_layer("x", 8, 8, false);
  Inputs options;
  std::string key = "x";
  SECTION("without any") {}
  SECTION("causal") {
    options = {{"is_causal", truth(true)}};
  }
  SECTION("scale") {
    options = {{"scale", number(0.5)}};
  }
  SECTION("dropout") {
    options = {{"dropout_p", number(0.5)}};
  }
  SECTION("groups of queries") {
    key = net.slice("x", 1, 0, 1);
    options = {{"enable_gqa", truth(true)}};
  }
  net.returns(net.attend(query, key, key, options));
  CHECK(fused(net).at("attention") == 1);
  check_equal(net, tokens());
}

TEST_CASE("shapes of attention that only LibTorch broadcasts are left to it", "[export]") {
  // Views of x [batch, 4, 8, 8].
  Network net;
  const auto x = net.conv("x", 1);
  SECTION("two dimensions") {
    const auto matrix = net.select(net.select(x, 0, 0), 0, 0);
    net.returns(net.attend(matrix, matrix, matrix));
  }
  SECTION("one batch for all") {
    const auto sequences = net.select(x, 1, 0);
    const auto one = net.slice(sequences, 0, 0, 1);
    net.returns(net.attend(one, sequences, sequences));
  }
  SECTION("one query head for all") {
    const auto head = net.slice(x, 1, 0, 1);
    net.returns(net.attend(head, x, x));
  }
  CHECK(fused(net).at("attention") == 1);
  check_equal(net, images());
}

TEST_CASE("a bias that broadcasts", "[export]") {
  Network net;
  net.returns(net.call("linear.default", {{"input", tensor("x")},
                                          {"weight", tensor(net.weight({5, 8}))},
                                          {"bias", tensor(net.weight({1}))}}));
  CHECK(fused(net) == Counts{{"linear", 1}});
  check_equal(net, images());
}

TEST_CASE("autocast changes the dtypes that it changes without fusion", "[export]") {
  const auto type = GENERATE(at::kFloat, at::kDouble);
  const auto net = GENERATE(false, true) ? gpt2_block(0, type) : llama_block(type);
  const auto plain = train(net, tokens(), {.autocasts = true});
  const auto replaced = train(net, tokens(), {.fuse = true, .autocasts = true});
  for (std::size_t i = 0; i < plain.size(); ++i) {
    INFO("tensor " << i);
    REQUIRE(plain[i].scalar_type() == replaced[i].scalar_type());
    // Gradients of a value with several readers are summed in another order, in bfloat16.
    CHECK(at::allclose(plain[i], replaced[i], /*rtol=*/1e-2, /*atol=*/5e-3));
  }
  CHECK(at::equal(plain[0], replaced[0]));
}

TEST_CASE("a transformer's layers are replaced", "[export]") {
  Network net;
  const auto normed = net.call("layer_norm.default", {{"input", tensor("x")},
                                                      {"normalized_shape", integers({8})},
                                                      {"weight", tensor(net.weight({8}))},
                                                      {"bias", tensor(net.weight({8}))}});
  const auto mixed = net.call("scaled_dot_product_attention.default", {{"query", tensor(normed)},
                                                                       {"key", tensor(normed)},
                                                                       {"value", tensor("x")},
                                                                       {"is_causal", truth(true)}});
  const auto wide = net.call("linear.default", {{"input", tensor(mixed)},
                                                {"weight", tensor(net.weight({16, 8}))},
                                                {"bias", tensor(net.weight({16}))}});
  const auto active =
      net.call("gelu.default", {{"self", tensor(wide)}, {"approximate", {{"as_string", "tanh"}}}});
  net.returns(net.call("linear.default",
                       {{"input", tensor(active)}, {"weight", tensor(net.weight({8, 16}))}}));
  CHECK(fused(net) == Counts{{"layer_norm", 1}, {"attention", 1}, {"gelu", 1}, {"linear", 1}});
  check_equal(net, images());
}

TEST_CASE("forward() runs the ops only on request", "[export]") {
  const bool fuse = GENERATE(false, true);
  Network net({8});
  net.returns(net.linear_layer("x", 3, 7, false));  // does not fit x
  auto module = load(net, {.fuse = fuse});
  CHECK_THAT(testing::message_of([&] { module->forward(vectors()); }),
             Catch::Contains(fuse ? "(linear)" : "(torch.ops.aten.linear.default)"));
}
