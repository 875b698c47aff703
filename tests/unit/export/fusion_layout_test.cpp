// SPDX-License-Identifier: Apache-2.0
// Copies of permuted values, rolls, pads of nothing and products of permuted matrices: which calls
// are replaced, and that the numbers stay.
#include "unit/export/fused_network.hpp"

using namespace export_test;

namespace {

constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();

/// Calls that only change places.
struct LayoutNetwork : Network {
  using Network::Network;

  std::string permute(const std::string& x, const std::vector<int64_t>& dims) {
    return call("permute.default", {{"self", tensor(x)}, {"dims", integers(dims)}});
  }
  std::string reshape(const std::string& x, const std::vector<int64_t>& sizes) {
    return call("reshape.default", {{"self", tensor(x)}, {"shape", integers(sizes)}});
  }
  std::string contiguous(const std::string& x) { return unary("contiguous.default", x); }
  std::string roll(const std::string& x, const Json& shifts, const Json& dims) {
    return call("roll.default", {{"self", tensor(x)}, {"shifts", shifts}, {"dims", dims}});
  }
  std::string pad(const std::string& x, const std::vector<int64_t>& widths) {
    return call("pad.default", {{"self", tensor(x)}, {"pad", integers(widths)}});
  }
  std::string matmul(const std::string& a, const std::string& b) {
    return call("matmul.default", {{"self", tensor(a)}, {"other", tensor(b)}});
  }
  std::string softmax(const std::string& x) { return unary_at("softmax.int", x, -1); }
  /// A value that the caller does not have.
  std::string made() { return unary("cos.default", multiply("x", weight({8}))); }
};

/// x [batch, 8, 8, 8]: attention within windows of 4 by 4 places, two heads of 4 values, as
/// torchvision's Swin composes it.
LayoutNetwork swin_attention(bool shifts, at::ScalarType type = at::kFloat) {
  LayoutNetwork net({8, 8, 8}, type);
  auto x = net.pad(net.layer_norm("x", 8), {0, 0, 0, 0, 0, 0});
  x = shifts ? net.roll(x, integers({-2, -2}), integers({1, 2})) : x;
  const auto windows = net.permute(net.view(x, {-1, 2, 4, 2, 4, 8}), {0, 1, 3, 2, 4, 5});
  const auto rows = net.reshape(windows, {-1, 16, 8});
  const auto qkv = net.reshape(net.linear_layer(rows, 24, 8, true), {-1, 16, 3, 2, 4});
  const auto heads = net.permute(qkv, {2, 0, 3, 1, 4});
  const auto query = net.with("mul.Tensor", net.select(heads, 0, 0), 0.5);
  const auto key = net.select(heads, 0, 1), value = net.select(heads, 0, 2);
  auto scores = net.matmul(query, net.transpose(key, -2, -1));
  scores = net.softmax(net.add(scores, net.weight({2, 16, 16})));
  const auto mixed = net.transpose(net.matmul(scores, value), 1, 2);
  const auto out = net.linear_layer(net.reshape(mixed, {-1, 16, 8}), 8, 8, true);
  const auto image = net.permute(net.view(out, {-1, 2, 2, 4, 4, 8}), {0, 1, 3, 2, 4, 5});
  x = net.reshape(image, {-1, 8, 8, 8});
  x = shifts ? net.roll(x, integers({2, 2}), integers({1, 2})) : x;
  net.returns(net.add("x", x));
  return net;
}

/// Of x [batch, 2, 8, 8], a value that is permuted. It is the program's own.
std::string permuted(LayoutNetwork& net) {
  return net.permute(net.made(), {0, 2, 1, 3});
}

int count_of(const Network& net, const std::string& name) {
  return fused(net)[name];
}

/// A few operators behind which a batch norm's strides may change, or not.
struct PooledNetwork : Network {
  std::string pooled(int64_t size = 1) {
    const auto x = relu(norm(conv("x", 3)), true);
    return call("adaptive_avg_pool2d.default",
                {{"self", tensor(x)}, {"output_size", integers({size, size})}});
  }
  void drops_in_place(const std::string& x) {
    returns(call("dropout_.default",
                 {{"self", tensor(x)}, {"p", number(0.5)}, {"train", truth(true)}}));
  }
};

}  // namespace

TEST_CASE("windowed attention as torchvision writes it", "[export]") {
  const bool shifts = GENERATE(false, true);
  const auto type = GENERATE(at::kFloat, at::kBFloat16, at::kDouble);
  const auto net = swin_attention(shifts, type);
  Counts counts = {{"layer_norm", 1}, {"linear", 2}, {"pad", 1},
                   {"reshape", 3},    {"matmul", 2}, {"select_each", 1}};
  if (shifts) {
    counts["roll"] = 2;
  }
  CHECK(fused(net) == counts);
  at::manual_seed(2);
  check_equal(net, at::randn({3, 8, 8, 8}));
}

TEST_CASE("copies of permuted values are replaced", "[export]") {
  LayoutNetwork net({2, 8, 8});
  const auto x = GENERATE(0, 1) == 0 ? permuted(net) : net.transpose(net.made(), 1, 2);
  SECTION("to other sizes") {
    net.returns(net.reshape(x, {-1, 16}));
    CHECK(fused(net) == Counts{{"reshape", 1}});
  }
  SECTION("to sizes of the program") {
    const auto rows = net.call("sym_size.int", {{"self", tensor("x")}, {"dim", integer(0)}});
    net.nodes.back()["outputs"] = Json::array({size_name(rows)});
    net.returns(net.call("reshape.default",
                         {{"self", tensor(x)},
                          {"shape", {{"as_sym_ints", {{{"as_name", rows}}, {{"as_int", 128}}}}}}}));
    CHECK(fused(net) == Counts{{"reshape", 1}});
  }
  SECTION("to contiguous memory") {
    net.returns(net.contiguous(x));
    CHECK(fused(net) == Counts{{"contiguous", 1}});
  }
  check_equal(net, tokens());
}

TEST_CASE("copies of other values stay", "[export]") {
  LayoutNetwork net({2, 8, 8});
  SECTION("that nothing permuted") {
    net.returns(net.contiguous(net.reshape(net.made(), {-1, 16, 8})));
  }
  SECTION("that are written later, in another shape") {
    const auto y = net.reshape(permuted(net), {-1, 16});
    net.returns(net.relu(y, true));
  }
  SECTION("that are written later, through a view") {
    const auto y = net.contiguous(permuted(net));
    net.relu(net.select(y, 1, 0), true);
    net.returns(y);
  }
  SECTION("whose input is written later") {
    // The reshape is a view here.
    const auto x = net.permute(net.made(), {0, 1, 2, 3});
    const auto y = net.reshape(x, {-1, 16, 8});
    net.relu(x, true);
    net.returns(y);
  }
  SECTION("with channels last") {
    net.returns(net.call("contiguous.default", {{"self", tensor(permuted(net))},
                                                {"memory_format", {{"as_memory_format", 2}}}}));
  }
  CHECK(fused(net).empty());
  check_equal(net, tokens());
}

TEST_CASE("rolls by known shifts are replaced", "[export]") {
  LayoutNetwork net({2, 8, 8});
  const auto sums = [&](const Json& shifts, const Json& dims) {
    net.returns(net.roll(net.multiply("x", net.weight({8})), shifts, dims));
  };
  SECTION("along two dimensions") {
    sums(integers({-3, 2}), integers({1, 2}));
    CHECK(fused(net) == Counts{{"roll", 1}});
  }
  SECTION("by more than there is, from the end") {
    sums(integers({-19}), integers({-1}));
    CHECK(fused(net) == Counts{{"roll", 1}});
  }
  SECTION("along one dimension twice") {
    sums(integers({3, -1}), integers({2, -2}));
    CHECK(fused(net) == Counts{{"roll", 1}});
  }
  SECTION("not by sizes of the program") {
    const auto rows = net.call("sym_size.int", {{"self", tensor("x")}, {"dim", integer(0)}});
    net.nodes.back()["outputs"] = Json::array({size_name(rows)});
    sums({{"as_sym_ints", {{{"as_name", rows}}}}}, integers({1}));
    CHECK(fused(net).empty());
  }
  SECTION("not of the flat value") {
    net.returns(net.call("roll.default", {{"self", tensor(net.multiply("x", net.weight({8})))},
                                          {"shifts", integers({3})}}));
    CHECK(fused(net).empty());
  }
  check_equal(net, tokens());
}

TEST_CASE("a pad of nothing is left out", "[export]") {
  LayoutNetwork net({2, 8, 8});
  const auto x = net.multiply(net.made(), net.weight({8}));
  int pads = 0;
  SECTION("before one reader") {
    net.returns(net.unary("sin.default", net.pad(x, {0, 0, 0, 0})));
    pads = 1;
  }
  SECTION("also of a value with other readers") {
    const auto y = net.pad(x, {0, 0});
    net.returns(net.add(net.unary("sin.default", y), x));
    pads = 1;
  }
  SECTION("not one of something") {
    net.returns(net.unary("sin.default", net.pad(x, {0, 0, 0, 1})));
  }
  SECTION("not one of less") {
    net.returns(net.unary("sin.default", net.pad(x, {0, -1})));
  }
  SECTION("not as a result") {
    net.returns(net.pad(x, {0, 0}));
  }
  SECTION("not if a view of it is a result") {
    net.returns(net.view(net.pad(x, {0, 0}), {-1, 8}));
  }
  SECTION("not if its input is a result") {
    net.returns(net.unary("sin.default", net.pad(x, {0, 0})));
    net.returns(net.view(x, {-1, 8}));
  }
  SECTION("not of the program's input") {
    net.returns(net.multiply(net.pad("x", {0, 0}), x));
  }
  SECTION("not of a parameter") {
    net.returns(net.multiply(net.pad(net.weight({8}), {0, 0}), x));
  }
  SECTION("not before two readers") {
    const auto y = net.pad(x, {0, 0});
    net.returns(net.multiply(net.unary("sin.default", y), y));
  }
  SECTION("not if it is written later") {
    net.returns(net.relu(net.pad(x, {0, 0}), true));
  }
  SECTION("not if a view of it is written later") {
    net.returns(net.relu(net.view(net.pad(x, {0, 0}), {-1, 8}), true));
  }
  SECTION("not if its input is written later") {
    const auto y = net.pad(x, {0, 0});
    net.relu(x, true);
    net.returns(net.unary("sin.default", y));
  }
  SECTION("not if a view of its input is written later") {
    const auto part = net.select(x, 1, 0);
    const auto y = net.unary("sin.default", net.pad(x, {0, 0}));
    net.relu(part, true);
    net.returns(y);
  }
  CHECK(count_of(net, "pad") == pads);
  if (net.outputs.size() == 1) {
    check_equal(net, tokens());
  }
}

TEST_CASE("products of permuted matrices are replaced", "[export]") {
  LayoutNetwork net({2, 8, 8});
  const auto x = net.multiply("x", net.weight({8}));
  SECTION("the first") {
    net.returns(net.matmul(net.permute(x, {0, 1, 3, 2}), x));
  }
  SECTION("the second") {
    net.returns(net.matmul(x, net.transpose(x, 2, 3)));
  }
  SECTION("a part of what was permuted") {
    const auto parts = net.permute(x, {1, 0, 2, 3});
    net.returns(net.matmul(net.select(parts, 0, 0), net.unary("cos.default", net.select(x, 1, 1))));
  }
  SECTION("with a factor") {
    const auto factor = GENERATE(number(0.25), integer(3), number(1));
    const auto scaled =
        net.call("mul.Tensor", {{"self", tensor(net.transpose(x, 2, 3))}, {"other", factor}});
    net.returns(net.matmul(scaled, net.made()));
  }
  CHECK(count_of(net, "matmul") == 1);
  check_equal(net, tokens());
}

TEST_CASE("products of other matrices stay", "[export]") {
  LayoutNetwork net({2, 8, 8});
  const auto x = net.multiply("x", net.weight({8}));
  SECTION("of values that nothing permuted") {
    net.returns(net.matmul(x, net.made()));
  }
  SECTION("with a factor of such a value") {
    net.returns(net.matmul(net.with("mul.Tensor", x, 0.5), net.made()));
  }
  CHECK(fused(net).empty());
  check_equal(net, tokens());
}

TEST_CASE("a factor stays in front of a product", "[export]") {
  LayoutNetwork net({2, 8, 8});
  const auto x = net.transpose(net.multiply("x", net.weight({8})), 2, 3);
  const auto y = net.transpose(net.made(), 2, 3);
  std::string scaled;
  int products = 1;
  SECTION("if it is a tensor") {
    scaled = net.multiply(x, net.weight({1}));
    net.returns(net.matmul(scaled, y));
  }
  SECTION("if something else reads the product of it") {
    scaled = net.with("mul.Tensor", x, 0.5);
    net.returns(net.add(net.matmul(scaled, y), scaled));
  }
  SECTION("if the result reads it twice") {
    scaled = net.with("mul.Tensor", x, 0.5);
    net.returns(net.add(net.matmul(scaled, scaled), y));
    products = 0;
  }
  SECTION("if it is one of the second matrices") {
    scaled = net.with("mul.Tensor", y, 0.5);
    net.returns(net.matmul(x, scaled));
  }
  SECTION("if it is written") {
    scaled = net.with("mul_.Tensor", net.contiguous(x), 0.5);
    net.returns(net.matmul(scaled, y));
  }
  SECTION("if the value is written between") {
    scaled = net.with("mul.Tensor", x, 0.5);
    net.relu(x, true);
    net.returns(net.add(net.matmul(scaled, y), x));
  }
  SECTION("if the value is written later") {
    scaled = net.with("mul.Tensor", x, 0.5);
    const auto product = net.matmul(scaled, y);
    net.returns(net.add(product, net.relu(x, true)));
  }
  SECTION("if the value is one of the caller's") {
    scaled = net.with("mul.Tensor", "x", 0.5);
    net.returns(net.add(net.matmul(scaled, y), x));
  }
  auto program = ddp::detail::read_program(net.program().dump());
  CHECK(ddp::detail::fuse(program)["matmul"] == products);
  const auto& nodes = program.graph.nodes;
  CHECK(std::any_of(nodes.begin(), nodes.end(), [&](const auto& node) {
    return !node.outputs.empty() && node.outputs[0].name() &&
           node.outputs[0].name()->name == scaled;
  }));
  check_equal(net, tokens());
}

TEST_CASE("a product whose factor is missing stays", "[export]") {
  LayoutNetwork net({2, 8, 8});
  const auto x = net.transpose(net.made(), 2, 3);
  net.returns(net.matmul(net.unary("mul.Tensor", x), net.made()));
  CHECK(count_of(net, "matmul") == 0);
}

TEST_CASE("whole numbers are multiplied as such", "[export]") {
  LayoutNetwork net({2, 8, 8});
  const auto places = net.unary_at("argsort.default", "x", -1);
  const auto scaled = net.call(
      "mul.Tensor", {{"self", tensor(net.transpose(places, 2, 3))}, {"other", integer(3)}});
  const auto product = net.matmul(scaled, net.unary("neg.default", places));
  const auto weight = net.weight({8});
  net.returns(net.multiply(net.to(product, at::kFloat), weight));
  CHECK(count_of(net, "matmul") == 1);
  check_equal(net, tokens());
}

TEST_CASE("a row of x[:, 0] is selected before the last layers", "[export]") {
  Network net({8, 8});
  const auto of = [&](const std::string& value, const std::vector<Json>& sizes) {
    net.values[value] = {{"sizes", sizes}};
    return value;
  };
  const std::vector<Json> sizes = {symbol("s0"), integer(8), integer(8)};
  int64_t start = 0, end = kEnd, step = 1;
  int rows = 0;
  SECTION("behind a slice of all samples") {
    rows = 1;
  }
  SECTION("not behind a slice of the later ones") {
    start = 1;
  }
  SECTION("not behind one of every second sample") {
    step = 2;
  }
  SECTION("not behind one of the first") {
    end = 2;
  }
  const auto y = of(net.linear_layer(of(net.unary("cos.default", "x"), sizes), 8, 8, true), sizes);
  const auto all = of(net.call("slice.Tensor", {{"self", tensor(y)},
                                                {"dim", integer(0)},
                                                {"start", integer(start)},
                                                {"end", integer(end)},
                                                {"step", integer(step)}}),
                      sizes);
  net.returns(net.select(all, 1, 0));
  CHECK(count_of(net, "select_row") == rows);
  check_equal(net, sequences());
}

TEST_CASE("a dropped pixel for each channel keeps no strides", "[export]") {
  PooledNetwork net;
  Counts counts;
  SECTION("of one pixel") {
    net.drops_in_place(net.flatten(net.pooled(), 1));
    counts = {{"batch_norm_relu", 1}, {"conv2d", 1}};
  }
  SECTION("but of more pixels") {
    net.drops_in_place(net.flatten(net.pooled(2), 1));
  }
  SECTION("but of all samples in one row") {
    net.drops_in_place(net.flatten(net.pooled(), GENERATE(0, 2)));
  }
  SECTION("but without a pool") {
    net.drops_in_place(net.flatten(net.norm(net.conv("x", 3)), 1));
  }
  CHECK(fused(net) == counts);
  check_equal(net, images());
}

TEST_CASE("patches are merged, and their numbers stay", "[export]") {
  PatchMerging merging;
  merging.first_fastest = GENERATE(true, false);
  if (GENERATE(true, false)) {
    std::swap(merging.first, merging.second);
  }
  const auto net = merged_patches(merging);
  CHECK(fused(net) == Counts{{"linear", 1}, {"space_to_depth", 1}});
  at::manual_seed(2);
  check_equal(net, at::randn({3, 8, 8, 8}));
}

TEST_CASE("other joined slices stay", "[export]") {
  const auto merging =
      GENERATE(PatchMerging{.step = 3}, PatchMerging{.end = 7}, PatchMerging{.dim = 3},
               PatchMerging{.last = 1}, PatchMerging{.last = 2}, PatchMerging{.step = 1},
               PatchMerging{.second = 1});
  CHECK(count_of(merged_patches(merging), "space_to_depth") == 0);
}
