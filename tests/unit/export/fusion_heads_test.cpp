// SPDX-License-Identifier: Apache-2.0
// torch.nn.MultiheadAttention and losses behind a vocabulary: which chains are replaced, and that
// the numbers stay.
#include "unit/export/fused_network.hpp"

using namespace export_test;

namespace {

const Counts kLoss = {{"linear_cross_entropy", 1}};

}  // namespace

TEST_CASE("multi-head attention is one call, and its numbers stay", "[export]") {
  MultiheadOptions options;
  options.dropout_p = GENERATE(0.0, 0.5);
  options.has_bias = GENERATE(true, false);
  const auto type = GENERATE(at::kFloat, at::kDouble, at::kBFloat16);
  const auto net = multihead_attention(options, type);
  CHECK(fused(net) == Counts{{"multihead_attention", 1}});
  check_equal(net, sequences());
}

TEST_CASE("the residual sum leaves multi-head attention its last layer", "[export]") {
  MultiheadOptions options;
  options.batch_first = GENERATE(false, true);
  options.dropout_p = GENERATE(0.0, 0.5);
  options.branch = GENERATE("sum", "norm");
  const auto net = multihead_attention(options);
  CHECK(fused(net) == Counts{{"multihead_attention", 1},
                             {options.branch == "norm" ? "add_layer_norm" : "add_branch", 1}});
  check_equal(net, sequences());
}

TEST_CASE("multi-head attention of another form stays", "[export]") {
  MultiheadOptions options;
  SECTION("with packed parts that something else reads") {
    options.reads_packed = true;
  }
  SECTION("whose queries are the second part") {
    options.value_order = {1, 0, 2};
  }
  SECTION("whose queries have other rows") {
    options.query_rows = {-1, 6, 4};
  }
  const auto net = multihead_attention(options);
  CHECK(fused(net).count("multihead_attention") == 0);
  CHECK(fused(net).at("attention") == 1);
  check_equal(net, sequences());
}

TEST_CASE("a loss behind a linear layer", "[export]") {
  const auto type = GENERATE(at::kFloat, at::kDouble, at::kBFloat16);
  Loss loss(type);
  SECTION("of a view") {
    loss.returns_loss(loss.net.view(loss.logits(), {-1, 8}));
  }
  SECTION("in float32, as transformers writes it") {
    loss.returns_loss(loss.net.view(loss.net.to(loss.logits(false), at::kFloat), {-1, 8}));
  }
  SECTION("in float32 after a flatten") {
    const auto rows = loss.net.flatten(loss.logits(), 0, GENERATE(1, -2));
    loss.returns_loss(loss.net.to(rows, at::kFloat));
  }
  SECTION("that sums, and ignores a class") {
    loss.returns_loss(loss.net.view(loss.logits(), {-1, 8}),
                      {{"reduction", integer(at::Reduction::Sum)}, {"ignore_index", integer(3)}});
  }
  SECTION("with label smoothing") {
    loss.returns_loss(loss.net.view(loss.logits(), {-1, 8}), {{"label_smoothing", number(0.1)}});
  }
  CHECK(fused(loss.net) == kLoss);
  check_equal(loss.net, sequences());
}

TEST_CASE("a loss of another form stays", "[export]") {
  Loss loss(at::kFloat);
  auto& net = loss.net;
  SECTION("of all rows alone") {
    loss.returns_loss(net.view(loss.logits(), {-1, 8}),
                      {{"reduction", integer(at::Reduction::None)}});
  }
  SECTION("with weights of classes") {
    loss.returns_loss(net.view(loss.logits(), {-1, 8}),
                      {{"weight", tensor(net.statistics(at::arange(8)))}});
  }
  SECTION("whose logits something else reads") {
    const auto logits = loss.logits();
    loss.returns_loss(net.view(logits, {-1, 8}));
    net.output(tensor(logits));
    CHECK(fused(net) == Counts{{"linear", 1}});
    return;  // two results
  }
  SECTION("of logits in float64") {
    const auto wide = net.to(loss.logits(), at::kDouble);
    loss.returns_loss(net.view(wide, {-1, 8}));
  }
  CHECK(fused(net).count("linear_cross_entropy") == 0);
  check_equal(net, sequences());
}

TEST_CASE("a loss of other dimensions that are flattened", "[export]") {
  Network net({2, 8, 8});
  const auto x = GENERATE(0, 1) == 0 ? std::string("x") : net.view("x", {-1, 8});
  const auto labels = net.unary_at("argmax.default", x, -1);
  const auto logits = net.linear_layer(x, 8, 8, true);
  const auto rows = net.flatten(logits, 0, -2);
  net.returns(net.call("cross_entropy_loss.default",
                       {{"self", tensor(rows)}, {"target", tensor(net.view(labels, {-1}))}}));
  CHECK(fused(net) == kLoss);
  check_equal(net, tokens());
}

TEST_CASE("a loss of probabilities, or of classes in other places, is LibTorch's", "[export]") {
  Loss loss(at::kFloat);
  auto& net = loss.net;
  const bool has_places = GENERATE(false, true);
  CAPTURE(has_places);
  if (has_places) {
    // [batch, classes, places] and labels [batch, places]
    net.returns(net.call("cross_entropy_loss.default",
                         {{"self", tensor(loss.logits())}, {"target", tensor(loss.places)}}));
  } else {
    const auto rows = net.call("softmax.int", {{"self", tensor("x")}, {"dim", integer(-1)}});
    net.returns(
        net.call("cross_entropy_loss.default", {{"self", tensor(net.view(loss.logits(), {-1, 8}))},
                                                {"target", tensor(net.view(rows, {-1, 8}))}}));
  }
  CHECK(fused(net) == kLoss);
  check_equal(net, sequences());
}
