// SPDX-License-Identifier: Apache-2.0
// Copies of permuted values, rolls, pads of zeros and products of permuted matrices in exported
// programs: which are replaced, and that the numbers stay. (Their kernels:
// tests/gpu/layout_test.cpp.)
#include "unit/export/fused_network.hpp"

using namespace export_test;

namespace {

constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();

/// x [batch, 8, 8, 8]: images whose channels come last, in windows of 4 x 4.
struct Windows : Network {
  Windows() : Network({8, 8, 8}) {}

  std::string permute(const std::string& x, const std::vector<int64_t>& dims) {
    return call("permute.default", {{"self", tensor(x)}, {"dims", integers(dims)}});
  }
  std::string transpose(const std::string& x, int64_t a, int64_t b) {
    return call("transpose.int", {{"self", tensor(x)}, {"dim0", integer(a)}, {"dim1", integer(b)}});
  }
  std::string reshape(const std::string& x, const std::vector<int64_t>& shape) {
    return call("reshape.default", {{"self", tensor(x)}, {"shape", integers(shape)}});
  }
  std::string matmul(const std::string& a, const std::string& b) {
    return call("matmul.default", {{"self", tensor(a)}, {"other", tensor(b)}});
  }
  std::string roll(const std::string& x, int64_t by) {
    return call("roll.default",
                {{"self", tensor(x)}, {"shifts", integers({by, by})}, {"dims", integers({1, 2})}});
  }
  std::string pad(const std::string& x, int64_t width = 0) {
    return call("pad.default", {{"self", tensor(x)}, {"pad", integers({0, 0, 0, 0, 0, width})}});
  }
  std::string layer(const std::string& x, int64_t width = 8) {
    return linear_layer(x, width, 8, true);
  }
  std::string cut(const std::string& x) {
    return reshape(permute(view(x, {-1, 2, 4, 2, 4, 8}), {0, 1, 3, 2, 4, 5}), {-1, 16, 8});
  }
  std::string put_back(const std::string& x) {
    return reshape(permute(view(x, {-1, 2, 2, 4, 4, 8}), {0, 1, 3, 2, 4, 5}), {-1, 8, 8, 8});
  }
  /// Two heads of four values.
  std::string attention(const std::string& x) {
    const auto heads = permute(reshape(layer(x, 24), {-1, 16, 3, 2, 4}), {2, 0, 3, 1, 4});
    const auto query = select(heads, 0, 0), key = select(heads, 0, 1), value = select(heads, 0, 2);
    const auto scores = matmul(with("mul.Tensor", query, 0.5), transpose(key, -2, -1));
    const auto shares = call("softmax.int", {{"self", tensor(scores)}, {"dim", integer(-1)}});
    return layer(reshape(transpose(matmul(shares, value), 1, 2), {-1, 16, 8}));
  }
};

int count_of(const Network& net, const std::string& op) {
  const auto counts = fused(net);
  const auto found = counts.find(op);
  return found == counts.end() ? 0 : found->second;
}

}  // namespace

TEST_CASE("attention in shifted windows is replaced, and its numbers stay", "[export]") {
  Windows net;
  const auto x = net.layer("x");
  const auto branch = net.roll(net.put_back(net.attention(net.cut(net.roll(net.pad(x), -2)))), 2);
  net.returns(net.add(x, branch));
  CHECK(fused(net) == Counts{{"linear", 3},
                             {"matmul", 2},
                             {"pad", 1},
                             {"reshape", 3},
                             {"roll", 2},
                             {"select_each", 1}});
  check_equal(net, images(8));
}

TEST_CASE("a copy is replaced behind a permutation, unless somebody writes it", "[export]") {
  const auto op = GENERATE("reshape", "contiguous");
  const bool is_reshape = std::string(op) == "reshape";
  const auto copy = [&](Windows& net, const std::string& x) {
    return is_reshape ? net.reshape(x, {-1, 8, 8, 8}) : net.unary("contiguous.default", x);
  };
  Windows net;
  net.returns(net.layer(copy(net, net.permute(net.layer("x"), {0, 2, 1, 3}))));
  CHECK(count_of(net, op) == 1);
  check_equal(net, images(8));

  Windows written;
  written.returns(
      written.relu(copy(written, written.permute(written.layer("x"), {0, 2, 1, 3})), true));
  CHECK(count_of(written, op) == 0);
  check_equal(written, images(8));

  Windows dense;
  dense.returns(dense.layer(copy(dense, dense.layer("x"))));
  CHECK(count_of(dense, op) == 0);
}

TEST_CASE("a contiguous copy in a memory format stays", "[export]") {
  Windows net;
  const auto x = net.permute(net.layer("x"), {0, 3, 1, 2});
  net.returns(net.call("contiguous.default",
                       {{"self", tensor(x)}, {"memory_format", {{"as_memory_format", 2}}}}));
  CHECK(count_of(net, "contiguous") == 0);
  check_equal(net, images(8));
}

TEST_CASE("a pad of zeros is replaced where nobody sees that it shares memory", "[export]") {
  Windows net;
  net.returns(net.layer(net.pad(net.layer("x"))));
  CHECK(count_of(net, "pad") == 1);
  check_equal(net, images(8));

  Windows wide;
  wide.returns(wide.layer(wide.pad(wide.layer("x"), 1)));
  CHECK(count_of(wide, "pad") == 0);

  Windows written;
  const auto x = written.layer("x");
  const auto padded = written.pad(x);
  written.returns(written.add(written.relu(padded, true), x));
  CHECK(count_of(written, "pad") == 0);
  check_equal(written, images(8));

  Windows written_before;
  const auto y = written_before.layer("x");
  const auto kept = written_before.pad(y);
  written_before.returns(written_before.add(written_before.with("add_.Tensor", y, 1), kept));
  CHECK(count_of(written_before, "pad") == 0);
  check_equal(written_before, images(8));

  Windows result;
  result.returns(result.pad(result.layer("x")));
  CHECK(count_of(result, "pad") == 0);
}

TEST_CASE("a product of permuted matrices takes a constant factor", "[export]") {
  const auto heads = [](Windows& net) { return net.permute(net.layer("x"), {0, 2, 1, 3}); };
  Windows net;
  const auto a = heads(net);
  net.returns(net.matmul(net.with("mul.Tensor", a, 0.5), net.layer("x")));
  auto program = ddp::detail::read_program(net.program().dump());
  CHECK(ddp::detail::fuse(program).at("matmul") == 1);
  CHECK(program.graph.nodes.back().input("factor")->constant()->toDouble() == 0.5);
  check_equal(net, images(8));

  Windows shared;  // somebody else reads the scaled matrices
  const auto scaled = shared.with("mul.Tensor", heads(shared), 0.5);
  shared.returns(shared.add(shared.matmul(scaled, shared.transpose(scaled, 2, 3)), scaled));
  program = ddp::detail::read_program(shared.program().dump());
  CHECK(ddp::detail::fuse(program).at("matmul") == 1);
  check_equal(shared, images(8));

  Windows by_tensor;
  by_tensor.returns(by_tensor.matmul(by_tensor.multiply(heads(by_tensor), by_tensor.layer("x")),
                                     heads(by_tensor)));
  program = ddp::detail::read_program(by_tensor.program().dump());
  CHECK(ddp::detail::fuse(program).at("matmul") == 1);
  CHECK(program.graph.nodes.back().input("factor")->constant()->toDouble() == 1);
  check_equal(by_tensor, images(8));

  Windows dense;
  dense.returns(dense.matmul(dense.layer("x"), dense.layer("x")));
  CHECK(count_of(dense, "matmul") == 0);
}

TEST_CASE("the first index of x[:, 0] does not keep a row from moving", "[export]") {
  const auto with_slice = [](int64_t start, int64_t end, int64_t step) {
    Network net({8, 8});
    const auto sizes = [&](const std::string& value) {
      net.values[value] = {{"sizes", {symbol("s0"), integer(8), integer(8)}}};
      return value;
    };
    const auto wide = sizes(net.linear_layer("x", 8, 8, true));
    const auto y = sizes(net.linear_layer(sizes(net.unary("gelu.default", wide)), 8, 8, true));
    const auto all = net.call("slice.Tensor", {{"self", tensor(y)},
                                               {"dim", integer(0)},
                                               {"start", integer(start)},
                                               {"end", integer(end)},
                                               {"step", integer(step)}});
    net.returns(net.linear_layer(net.select(sizes(all), 1, 0), 3, 8, true));
    check_equal(net, sequences());
    return count_of(net, "select_row");
  };
  CHECK(with_slice(0, kEnd, 1) == 1);
  CHECK(with_slice(1, kEnd, 1) == 0);
  CHECK(with_slice(0, 2, 1) == 0);
  CHECK(with_slice(0, kEnd, 2) == 0);
}

TEST_CASE("a pooled pixel that is written does not fix the strides before it", "[export]") {
  const auto replaced = [](int64_t pixels, int64_t start_dim, bool pools) {
    Network net;
    const auto x = net.relu(net.norm(net.conv("x", 3)));
    const auto mean =
        pools ? net.call("adaptive_avg_pool2d.default",
                         {{"self", tensor(x)}, {"output_size", integers({pixels, pixels})}})
              : x;
    net.returns(net.relu(net.flatten(mean, start_dim), true));
    if (pools) {  // else autograd refuses the write, as in Python
      check_equal(net, images());
    }
    return count_of(net, "batch_norm_relu");
  };
  CHECK(replaced(1, 1, true) == 1);
  CHECK(replaced(2, 1, true) == 0);
  CHECK(replaced(1, 0, true) == 0);
  CHECK(replaced(1, 1, false) == 0);
}
