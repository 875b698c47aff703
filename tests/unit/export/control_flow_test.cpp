// SPDX-License-Identifier: Apache-2.0
// Loops in a program: while_loop, scan and map, with the arguments that Python's exports give them.
#include <torch/torch.h>

#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "unit/export/archive_builder.hpp"

using namespace export_test;
using Catch::Contains;
using testing::message_of;

namespace {

at::Tensor rows() {
  return at::arange(1, 7, at::kFloat).view({2, 3});
}

}  // namespace

// n = 0; while n < 3: n += 1, y *= w
TEST_CASE("while_loop runs until its condition fails, and has gradients", "[export]") {
  ArchiveBuilder condition, body, archive;
  condition.input("n", {}).input("y", {integer(2), integer(3)}).input("w", {integer(3)});
  condition.node("torch.ops.aten.lt.Scalar", {{"self", tensor("n")}, {"other", integer(3)}},
                 {tensor("goes_on")});
  condition.output(tensor("goes_on"));
  body.input("n", {}).input("y", {integer(2), integer(3)}).input("w", {integer(3)});
  body.node("torch.ops.aten.add.Tensor", {{"self", tensor("n")}, {"other", integer(1)}},
            {tensor("next")});
  body.node("torch.ops.aten.mul.Tensor", {{"self", tensor("y")}, {"other", tensor("w")}},
            {tensor("product")});
  body.output(tensor("next")).output(tensor("product"));
  archive.parameter("w", at::full({3}, 2.0)).input("x", {integer(2), integer(3)});
  archive.input("n", {});
  archive.node("torch.ops.higher_order.while_loop",
               {{"", graph_argument(condition)},
                {"", graph_argument(body)},
                {"", list_of({"n", "x"})},
                {"", list_of({"p_w"})}},
               {tensor("last"), tensor("y")});
  archive.output(tensor("last")).output(tensor("y"));
  auto module = load(archive);
  const auto result = module->forward(rows(), at::zeros({}, at::kLong)).toTuple()->elements().vec();
  CHECK(result[0].toTensor().item<int64_t>() == 3);
  CHECK(at::equal(result[1].toTensor(), rows() * 8));
  result[1].toTensor().sum().backward();
  CHECK(at::equal(module->parameters()[0].grad(), rows().sum(0) * 12));  // 3 w^2
  const auto x = rows();
  const auto none = module->forward(x, at::full({}, 3, at::kLong)).toTuple()->elements().vec();
  CHECK(at::equal(none[1].toTensor(), x));
  CHECK_FALSE(none[1].toTensor().is_alias_of(x));  // as in Python
}

// carried, row -> carried + row, carried * row
TEST_CASE("scan carries a value over the rows and stacks the results", "[export]") {
  ArchiveBuilder body, archive;
  body.input("carried", {integer(3)}).input("row", {integer(3)});
  body.node("torch.ops.aten.add.Tensor", {{"self", tensor("carried")}, {"other", tensor("row")}},
            {tensor("sum")});
  body.node("torch.ops.aten.mul.Tensor", {{"self", tensor("carried")}, {"other", tensor("row")}},
            {tensor("product")});
  body.output(tensor("sum")).output(tensor("product"));
  archive.input("x", {symbol("s0"), integer(3)}).input("start", {integer(3)});
  archive.node("torch.ops.higher_order.scan",
               {{"", graph_argument(body)},
                {"", list_of({"start"})},
                {"", list_of({"x"})},
                {"", list_of({})}},
               {tensor("last"), tensor("products")});
  archive.output(tensor("last")).output(tensor("products"));
  auto module = load(archive);
  const auto start = at::ones({3});
  const auto result = module->forward(rows(), start).toTuple()->elements().vec();
  CHECK(at::equal(result[0].toTensor(), start + rows().sum(0)));
  CHECK(at::equal(result[1].toTensor(),
                  at::stack({start * rows()[0], (start + rows()[0]) * rows()[1]})));
  CHECK_THAT(message_of<ddp::SettingsError>([&] {
               module->forward(at::ones({0, 3}), start);
             }),
             Contains("made 1 values, and 2 at the export"));
}

TEST_CASE("map runs its graph for each row, with gradients of what all rows use", "[export]") {
  ArchiveBuilder body, archive;
  body.input("row", {integer(3)}).input("w", {integer(3)});
  body.node("torch.ops.aten.sin.default", {{"self", tensor("row")}}, {tensor("sine")});
  body.node("torch.ops.aten.mul.Tensor", {{"self", tensor("sine")}, {"other", tensor("w")}},
            {tensor("product")});
  body.output(tensor("product"));
  archive.parameter("w", at::full({3}, 2.0)).input("x", {symbol("s0"), integer(3)});
  archive.node("torch.ops.higher_order.map_impl",
               {{"", graph_argument(body)}, {"", list_of({"x"})}, {"", list_of({"p_w"})}},
               {tensor("y")});
  archive.output(tensor("y"));
  auto module = load(archive);
  const auto y = module->forward(rows()).toTensor();
  CHECK(at::equal(y, rows().sin() * 2));
  y.sum().backward();
  CHECK(at::allclose(module->parameters()[0].grad(), rows().sin().sum(0)));
}
