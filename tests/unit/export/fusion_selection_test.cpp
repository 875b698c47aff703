// SPDX-License-Identifier: Apache-2.0
// Rows that are selected before the operators that treat rows alike, and parts selected together.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "unit/export/fused_network.hpp"

using namespace export_test;

namespace {

constexpr int64_t kRows = 8, kWidth = 8;

/// Layers of which a classifier reads a row. An archive says the sizes of every value.
struct RowNetwork : Network {
  explicit RowNetwork(const std::vector<int64_t>& sizes = {kRows, kWidth}) : Network(sizes) {}

  std::string of(const std::string& value, std::vector<int64_t> sizes = {kRows, kWidth}) {
    std::vector<Json> dimensions = {symbol("s0")};
    for (const auto size : sizes) {
      dimensions.push_back(integer(size));
    }
    values[value] = {{"sizes", dimensions}};
    return value;
  }
  std::string layer(const std::string& x) { return of(linear_layer(x, kWidth, kWidth, true)); }
  std::string normed(const std::string& x) { return of(layer_norm(x, kWidth)); }
  std::string sum(const std::string& a, const std::string& b) { return of(add(a, b)); }
  /// x + layer(gelu(layer(norm(x)))): the end of a transformer.
  std::string branch(const std::string& x) {
    const auto wide = of(linear_layer(normed(x), 16, kWidth, true), {kRows, 16});
    const auto inner = of(unary("gelu.default", wide), {kRows, 16});
    return sum(x, of(dropout(of(linear_layer(inner, kWidth, 16, true)), 0)));
  }
  void classifies(const std::string& x, int64_t dim = 1, int64_t index = 2) {
    returns(linear_layer(select(x, dim, index), 3, kWidth, true));
  }
};

/// The operator narrows as on CUDA while this lives.
class NarrowsOnCpu {
 public:
  NarrowsOnCpu() {
    num_narrowed = 0;
    library_.impl("narrow_to_row", narrow);
  }
  static int num_narrowed;

 private:
  static std::tuple<at::Tensor, int64_t> narrow(const at::Tensor& x, int64_t dim, int64_t index,
                                                int64_t rows) {
    ++num_narrowed;
    const auto op = c10::Dispatcher::singleton()
                        .findSchemaOrThrow("libddp::narrow_to_row", "")
                        .typed<decltype(narrow)>();
    const auto all_rows = [&] {
      const at::AutoDispatchBelowAutograd below;
      return std::get<1>(op.call(x, dim, index, rows));
    }();
    return {x.size(dim) > 1 ? x.narrow(dim, index, 1) : x, all_rows};
  }

  torch::Library library_{torch::Library::IMPL, "libddp", c10::DispatchKey::AutogradCPU, __FILE__,
                          __LINE__};
};
int NarrowsOnCpu::num_narrowed = 0;

/// Moves `selections`, keeps the numbers on the CPU, and makes `narrowed` rows in a forward where
/// the operators narrow.
void check_moved(const RowNetwork& net, const at::Tensor& x, int selections, int narrowed) {
  auto counts = fused(net);
  CHECK(counts["select_row"] == selections);
  check_equal(net, x);
  const auto plain = train(net, x, {});
  const NarrowsOnCpu narrows;
  const auto moved = train(net, x, {.fuse = true});
  CHECK(NarrowsOnCpu::num_narrowed == 2 * narrowed);  // of two steps
  REQUIRE(plain.size() == moved.size());
  for (std::size_t i = 0; i < plain.size(); ++i) {
    INFO("tensor " << i << " differs by " << (plain[i] - moved[i]).abs().max().item());
    CHECK(at::allclose(plain[i], moved[i], 1e-4, 1e-5));
  }
}

}  // namespace

TEST_CASE("a row is selected before the last layers", "[export]") {
  RowNetwork net;
  const auto x = net.of(net.unary("cos.default", "x"));
  SECTION("of one residual branch") {
    net.classifies(net.normed(net.branch(x)));
    check_moved(net, sequences(), 1, 1);
  }
  SECTION("of two, the first value has another reader") {
    net.of(net.unary("sin.default", x));
    net.classifies(net.normed(net.branch(net.branch(x))));
    check_moved(net, sequences(), 1, 1);
  }
  SECTION("with dimension and index counted from the end") {
    net.classifies(net.branch(x), -2, -1);
    check_moved(net, sequences(), 1, 1);
  }
  SECTION("of a sum with itself") {
    net.classifies(net.layer(net.sum(x, x)));
    check_moved(net, sequences(), 1, 1);
  }
  SECTION("with an addend for all rows") {
    const auto mean =
        net.of(net.call("mean.dim",
                        {{"self", tensor("x")}, {"dim", integers({1})}, {"keepdim", truth(true)}}),
               {1, kWidth});
    net.classifies(net.layer(net.sum(x, mean)));
    check_moved(net, sequences(), 1, 2);
  }
  SECTION("with a vector and a number") {
    const auto bias = net.weight({kWidth});
    net.classifies(net.layer(net.of(net.with("mul.Tensor", net.sum(x, bias), 0.5))));
    check_moved(net, sequences(), 1, 1);
  }
}

TEST_CASE("two rows are selected before layers of their own", "[export]") {
  RowNetwork net;
  const auto x = net.of(net.unary("cos.default", "x"));
  const auto a = net.select(net.layer(x), 1, 0), b = net.select(net.layer(x), 1, 3);
  net.returns(net.add(a, b));
  check_moved(net, sequences(), 2, 2);
}

TEST_CASE("a row of tensors with four dimensions is selected early", "[export]") {
  RowNetwork net({2, kRows, kWidth});
  const std::vector<int64_t> sizes = {2, kRows, kWidth};
  net.values["x"] = {{"sizes", {symbol("s0"), integer(2), integer(kRows), integer(kWidth)}}};
  const auto y = net.of(net.linear_layer("x", kWidth, kWidth, true), sizes);
  net.classifies(net.of(net.unary("relu.default", y), sizes), 1, 1);
  check_moved(net, tokens(), 1, 1);
}

TEST_CASE("all rows are computed", "[export]") {
  RowNetwork net;
  const auto x = net.of(net.unary("cos.default", "x"));
  SECTION("where no layer would be smaller") {
    net.classifies(net.normed(x));
  }
  SECTION("where another operator reads them") {
    const auto y = net.layer(x);
    net.returns(net.add(net.select(y, 1, 0), net.select(y, 1, 1)));
  }
  SECTION("where the program returns them") {
    const auto y = net.layer(x);
    net.classifies(y);
    net.returns(y);
  }
  SECTION("where the archive does not say their dimensions") {
    net.classifies(net.linear_layer(x, kWidth, kWidth, true));
  }
  SECTION("for values instead of rows") {
    net.returns(net.select(net.layer(x), 2, 1));
  }
  SECTION("for samples with an addend of fewer dimensions") {
    const auto rows = net.weight({kRows, kWidth});
    net.classifies(net.sum(net.layer(x), rows));
  }
  auto counts = fused(net);
  CHECK(counts["select_row"] == 0);
}

TEST_CASE("a norm of all rows is computed before the selection", "[export]") {
  RowNetwork net;
  const auto y =
      net.of(net.call("layer_norm.default", {{"input", tensor(net.layer("x"))},
                                             {"normalized_shape", integers({kRows, kWidth})}}));
  net.classifies(net.layer(y));
  check_moved(net, sequences(), 1, 1);
}

TEST_CASE("a value that is written later is not narrowed", "[export]") {
  RowNetwork net;
  const auto x = net.of(net.unary("cos.default", "x"));
  const auto y = net.sum(net.layer(net.of(net.unary("sin.default", "x"))), x);
  const auto row = net.select(y, 1, 2);
  net.unary("relu_.default", x);
  net.returns(row);
  check_moved(net, sequences(), 0, 0);
}

TEST_CASE("a matrix of rows is also a linear layer's weight", "[export]") {
  RowNetwork net({kWidth});
  net.values["x"] = {{"sizes", {symbol("s0"), integer(kWidth)}}};
  const auto layer = [&](const std::string& x, const std::string& weight) {
    return net.of(net.call("linear.default", {{"input", tensor(x)}, {"weight", tensor(weight)}}),
                  {kWidth});
  };
  const auto y = net.of(net.linear_layer("x", kWidth, kWidth, true), {kWidth});
  SECTION("of itself") {
    net.returns(net.select(layer(y, y), 0, 1));
    check_moved(net, vectors(), 1, 1);
  }
  SECTION("of another layer, and added to its result") {
    const auto z = layer(net.of(net.linear_layer("x", kWidth, kWidth, true), {kWidth}), y);
    net.returns(
        net.select(net.of(net.add(z, net.of(net.unary("sum.default", y), {})), {kWidth}), 0, 1));
    check_moved(net, vectors(), 1, 1);
  }
  SECTION("made before") {
    const auto z = net.of(net.unary("sin.default", y), {kWidth});
    net.unary("cos.default", z);
    net.returns(net.select(layer(z, z), 0, 1));
    check_moved(net, vectors(), 1, 1);
  }
}

TEST_CASE("a linear layer adds a matrix to its rows", "[export]") {
  RowNetwork net({2, kRows, kWidth});
  const auto y = net.call("linear.default", {{"input", tensor("x")},
                                             {"weight", tensor(net.weight({kWidth, kWidth}))},
                                             {"bias", tensor(net.weight({kRows, kWidth}))}});
  net.classifies(net.of(y, {2, kRows, kWidth}), 2, 1);
  check_moved(net, tokens(), 0, 0);
}

TEST_CASE("a row stays strided where its reshape is written", "[export]") {
  RowNetwork net;
  const auto row = net.select(net.layer(net.of(net.unary("cos.default", "x"))), 1, 2);
  const auto flat = net.call("reshape.default", {{"self", tensor(row)}, {"shape", integers({-1})}});
  net.unary("relu_.default", flat);
  net.returns(row);
  check_moved(net, sequences(), 0, 0);
}

TEST_CASE("gradients of a value and its row are summed in the program's order", "[export]") {
  RowNetwork net;
  const auto x = net.layer("x");
  const auto wide = net.layer(x);
  const auto a = net.layer_norm(x, kWidth), b = net.unary("sin.default", x);
  const auto row = net.select(net.of(net.unary("gelu.default", wide)), 1, 2);
  const auto means =
      net.call("mean.dim", {{"self", tensor(net.multiply(a, b))}, {"dim", integers({1})}});
  net.returns(net.add(row, means));
  check_moved(net, sequences(), 1, 1);
}

TEST_CASE("a row that does not exist is refused", "[export]") {
  RowNetwork net;
  const auto head = [&](int64_t index) {
    const auto mean =
        net.of(net.call("mean.dim",
                        {{"self", tensor("x")}, {"dim", integers({1})}, {"keepdim", truth(true)}}),
               {1, kWidth});
    net.returns(net.select(net.layer(mean), 1, index));
  };
  SECTION("behind the last") {
    head(1);
  }
  SECTION("before the first") {
    head(-2);
  }
  SECTION("of values with other rows") {
    const auto rows = net.weight({1, 5, kWidth});
    net.classifies(net.sum(net.layer("x"), rows));
  }
  CHECK(fused(net)["select_row"] == 1);
  CHECK_THROWS_AS(train(net, sequences(), {}), c10::Error);
  CHECK_THROWS_AS(train(net, sequences(), {.fuse = true}), c10::Error);
  const NarrowsOnCpu narrows;
  CHECK_THROWS_AS(train(net, sequences(), {.fuse = true}), c10::Error);
}

TEST_CASE("a row does not take the name of an unused input", "[export]") {
  RowNetwork net;
  const auto x = net.of(net.unary("cos.default", "x"));
  const auto y = net.layer(x);
  net.input(x + ".row." + ddp::concat("v", net.nodes.size()), {symbol("s0")});
  net.classifies(y);
  CHECK(fused(net)["select_row"] == 1);
  CHECK_NOTHROW(load(net, {.fuse = true}));
}

TEST_CASE("names of many rows of one value stay short", "[export]") {
  RowNetwork net;
  std::string row;
  for (int64_t i = 0; i < 200; ++i) {
    row = net.select(net.layer("x"), 1, i % kRows);
  }
  net.returns(row);
  auto program = ddp::detail::read_program(net.program().dump());
  CHECK(ddp::detail::fuse(program)["select_row"] == 200);
  for (const auto& node : program.graph.nodes) {
    CHECK(node.name.size() < 30);  // quadratic names would take hours in a hostile program
  }
}

TEST_CASE("parts without names stay", "[export]") {
  Network net({3, 8, 8});
  const auto x = net.unary("cos.default", "x");
  for (int64_t i = 0; i < 2; ++i) {
    net.select(x, 1, i);
    net.nodes.back()["outputs"] = Json::array({Json{{"as_none", true}}});
  }
  net.returns(net.unary("sin.default", "x"));
  CHECK(fused(net)["select_each"] == 0);
  CHECK_NOTHROW(load(net, {.fuse = true}));
}

TEST_CASE("parts of a value are selected together", "[export]") {
  Network net({3, 8, 8});
  const auto x = net.multiply("x", net.weight({8}));
  int joined = 0;
  std::string result;
  SECTION("all") {
    const auto c = net.select(x, 1, 2), a = net.select(x, 1, 0), b = net.select(x, 1, 1);
    result = net.add(net.multiply(a, b), c);
    joined = 1;
  }
  SECTION("all that the program knows of") {
    result = net.multiply(net.select(x, 2, 0), net.select(x, 2, 1));
    joined = 1;
  }
  SECTION("not if one is missing") {
    result = net.multiply(net.select(x, 1, 0), net.select(x, 1, 2));
  }
  SECTION("not if one is selected twice") {
    const auto a = net.select(x, 1, 0), b = net.select(x, 1, 1);
    result = net.multiply(net.multiply(a, b), net.select(x, 1, 0));
  }
  SECTION("not along two dimensions") {
    result = net.multiply(net.select(x, 2, 0), net.select(x, 3, 1));
  }
  SECTION("not beside another reader") {
    const auto a = net.select(x, 1, 0), b = net.select(x, 1, 1);
    result = net.multiply(
        net.multiply(a, b),
        net.unary("neg.default",
                  net.call("sum.dim_IntList", {{"self", tensor(x)}, {"dim", integers({1})}})));
  }
  SECTION("not if one is written") {
    const auto a = net.select(x, 1, 0), b = net.select(x, 1, 1);
    result = net.add(net.relu(a, true), b);
  }
  SECTION("not if a view of one is returned, which the caller may write") {
    net.returns(net.transpose(net.select(x, 1, 0), 1, 2));
    result = net.select(x, 1, 1);
  }
  net.returns(result);
  CHECK(fused(net)["select_each"] == joined);
  if (net.outputs.size() == 1) {
    check_equal(net, images(3));
  }
}
