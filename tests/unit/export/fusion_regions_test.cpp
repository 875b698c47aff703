// SPDX-License-Identifier: Apache-2.0
// Programs with checkpointed blocks and control flow: which chains in and around them are replaced,
// and which views take any strides.
#include "unit/export/fused_network.hpp"

using namespace export_test;

namespace {

const std::vector<std::string> kBlock = {"block"};

/// Encloses the nodes that `add` makes.
template <typename Add>
std::string in_block(Network& net, const Add& add) {
  const auto first = net.nodes.size();
  const std::string result = add();
  net.module(kBlock[0], first);
  return result;
}

/// The recorded views refuse channels last, as ops give it on CUDA.
void check_any_strides(const Network& net, const std::vector<std::string>& blocks) {
  const auto x = images();
  const auto expected = train(net, x, {});
  const auto last = x.contiguous(at::MemoryFormat::ChannelsLast);
  const auto refusal = testing::message_of([&] { train(net, last, {}); });
  CHECK_THAT(refusal, Catch::Contains("view size is not compatible"));
  const auto replaced = train(net, last, {.fuse = true, .checkpoint_blocks = blocks});
  REQUIRE(expected.size() == replaced.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    INFO("tensor " << i);
    CHECK(at::allclose(expected[i], replaced[i], /*rtol=*/1e-4, /*atol=*/1e-5));  // other kernels
  }
}

/// flatten(x), times 2 in its own memory.
void write_rows(Network& net, const std::string& x) {
  net.with("mul_.Tensor", net.flatten(x), 2);
}

}  // namespace

TEST_CASE("a checkpointed block's chains are replaced, and its estimates move once", "[export]") {
  auto net = residual_network();
  net.module("block", 3);
  check_equal(net, images(), kBlock);
}

TEST_CASE("views around a checkpointed block take any strides", "[export]") {
  Network net;
  std::string y;
  SECTION("behind a norm") {
    y = in_block(net, [&] { return net.relu(net.norm(net.conv("x", 1))); });
  }
  SECTION("behind a dropout") {  // that drops next to nothing
    y = in_block(net, [&] { return net.dropout(net.conv("x", 1), 1e-6); });
  }
  SECTION("before a norm") {
    y = net.unary("neg.default", net.view(net.conv("x", 1), {-1, 4, 64}));
    y = net.view(y, {-1, 4, 8, 8});
    y = in_block(net, [&] { return net.relu(net.norm(y)); });
  }
  SECTION("in the block") {
    const auto z = net.unary("neg.default", net.conv("x", 1));
    y = in_block(net, [&] {
      const auto flat = net.view(z, {-1, 256});
      return net.unary("sin.default", net.add(net.view(net.relu(net.norm(z)), {-1, 256}), flat));
    });
  }
  net.returns(net.unary("sin.default", net.view(y, {-1, 256})));
  check_any_strides(net, kBlock);
}

TEST_CASE("a view of a value that was written before takes any strides", "[export]") {
  Network net;
  const auto y = net.relu(net.norm(net.conv("x", 1)), /*in_place=*/true);
  net.returns(net.linear_layer(net.view(y, {-1, 256}), 3, 256, true));
  check_any_strides(net, {});
}

TEST_CASE("images keep their strides if another graph flattens and writes them", "[export]") {
  Network net;
  std::string x;
  SECTION("the block makes them") {
    x = in_block(net, [&] { return net.conv("x", 3); });
    write_rows(net, x);
  }
  SECTION("the block flattens and writes them") {
    const auto y = net.conv("x", 3);
    x = in_block(net, [&] {
      write_rows(net, y);
      return net.unary("neg.default", y);
    });
  }
  SECTION("the block flattens them") {
    x = net.conv("x", 3);
    const auto rows = in_block(net, [&] { return net.flatten(x); });
    net.with("mul_.Tensor", rows, 2);
  }
  SECTION("the block writes their rows") {
    x = net.conv("x", 3);
    const auto rows = net.flatten(x);
    net.output(tensor(in_block(net, [&] { return net.with("mul_.Tensor", rows, 2); })));
  }
  SECTION("the block makes another value of them, which is flattened") {
    const auto y = net.conv("x", 3);
    x = in_block(net, [&] { return net.unary("silu.default", y); });
    write_rows(net, x);
  }
  net.returns(net.unary("neg.default", x));
  CHECK(fused(net, kBlock).empty());
}

TEST_CASE("images keep their strides if a loop writes what its last turn flattened", "[export]") {
  const bool is_written = GENERATE(false, true);
  ArchiveBuilder condition, body;
  for (auto* graph : {&condition, &body}) {
    graph->input("n", {}).input("y", {}).input("w", {});
  }
  condition.node("torch.ops.aten.lt.Scalar", {{"self", tensor("n")}, {"other", integer(3)}},
                 {tensor("goes_on")});
  condition.output(tensor("goes_on"));
  body.node(is_written ? "torch.ops.aten.relu_.default" : "torch.ops.aten.relu.default",
            {{"self", tensor("y")}}, {tensor("written")});
  body.node("torch.ops.aten.flatten.using_ints", {{"self", tensor("y")}}, {tensor("rows")});
  body.node("torch.ops.aten.conv2d.default",
            {{"input", tensor("y")}, {"weight", tensor("w")}, {"bias", {{"as_none", true}}}},
            {tensor("z")});
  body.node("torch.ops.aten.add.Tensor", {{"self", tensor("n")}, {"other", integer(1)}},
            {tensor("next")});
  body.output(tensor("next")).output(tensor("z"));
  Network net;
  const auto x = net.conv("x", 3);
  const auto n = net.call("zeros.default", {{"size", integers({})}});
  net.node("torch.ops.higher_order.while_loop",
           {{"", graph_argument(condition)},
            {"", graph_argument(body)},
            {"", list_of({n, x})},
            {"", list_of({net.weight({4, 4, 1, 1})})}},
           {tensor("last"), tensor("images")});
  net.returns("images");
  CHECK(fused(net) == (is_written ? Counts{} : Counts{{"conv2d", 2}}));
}

TEST_CASE("a chain moves across a block that neither writes nor reads its memory", "[export]") {
  Network net;
  const auto y = net.unary("neg.default", "x"), same = net.unary("alias.default", y);
  const auto mean = net.statistics(at::zeros({4}));
  const auto normed = net.norm(y, mean);
  Counts expected = {{"batch_norm_relu", 1}};
  std::string z;
  SECTION("that writes other estimates") {
    z = in_block(net, [&] { return net.dropout(net.norm("x"), 0.5); });
    expected = {{"batch_norm_relu", 1}, {"batch_norm", 1}, {"dropout", 1}};
  }
  SECTION("not across one with the same estimates") {
    z = in_block(net, [&] { return net.norm("x", mean); });
    expected = {{"batch_norm", 2}};
  }
  SECTION("not across one that writes its input by another name") {
    z = in_block(net, [&] { return net.with("mul_.Tensor", same, 2); });
    expected = {{"batch_norm", 1}};
  }
  net.returns(net.add(net.relu(normed), z));
  CHECK(fused(net, kBlock) == expected);
}

TEST_CASE("a chain with a dropout does not move across a block that draws", "[export]") {
  Network net({8});
  const auto y = net.unary("neg.default", "x");
  const auto dropped = net.dropout(net.linear_layer(y, 8, 8, true), 0.5);
  const auto z = in_block(net, [&] { return net.dropout("x", 0.5); });
  net.returns(net.add(z, dropped));
  CHECK(fused(net, kBlock).count("add_branch") == 0);
  check_equal(net, vectors(), kBlock);
}

TEST_CASE("results of a block that share memory are one value's", "[export]") {
  Network net;
  const auto y = net.unary("neg.default", "x");
  const auto first = net.nodes.size();
  const auto a = net.unary("sin.default", y), b = net.unary("alias.default", a);
  net.module(kBlock[0], first);
  const auto normed = net.norm(a);
  const auto written = net.with("mul_.Tensor", b, 2);
  net.returns(net.add(net.relu(normed), written));
  CHECK(fused(net, kBlock) == Counts{{"batch_norm", 1}});
}

TEST_CASE("nothing is fused if a block reads strides", "[export]") {
  Network net;
  const auto y = net.conv("x", 3);
  const auto part = in_block(net, [&] {
    return net.call(
        "as_strided.default",
        {{"self", tensor(y)}, {"size", integers({2, 4})}, {"stride", integers({4, 1})}});
  });
  net.returns(part);
  CHECK(fused(net, kBlock).empty());
}
