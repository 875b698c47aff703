// SPDX-License-Identifier: Apache-2.0
// Arithmetic on sizes, sizes at the call, lifetimes of values, errors of operators, control flow.
#include <torch/torch.h>

#include "ddp/export/exported_module.hpp"
#include "export/graph_plan.hpp"
#include "export/input_shapes.hpp"
#include "export/stack_functions.hpp"
#include "support/catch.hpp"
#include "support/message_of.hpp"
#include "unit/export/archive_builder.hpp"
#include "unit/train/temporary_folder.hpp"

using namespace export_test;
using Catch::Contains;
using ddp::detail::CallContext;
using ddp::detail::number_function;
using ddp::detail::ValueStack;
using testing::message_of;
using testing::TemporaryFolder;

namespace {

c10::IValue compute(const std::string& target, ValueStack stack) {
  number_function(target)(stack, CallContext{at::kCPU});
  return stack.at(0);
}

}  // namespace

TEST_CASE("Arithmetic on sizes follows Python", "[export]") {
  CHECK(compute("_operator.floordiv", {int64_t{-7}, int64_t{2}}).toInt() == -4);
  CHECK(compute("_operator.mod", {int64_t{-7}, int64_t{3}}).toInt() == 2);
  CHECK(compute("_operator.mod", {int64_t{7}, int64_t{-3}}).toInt() == -2);
  CHECK(compute("_operator.mod", {-7.5, 2.0}).toDouble() == 0.5);
  CHECK(compute("_operator.mod", {INT64_MIN, int64_t{-1}}).toInt() == 0);
  CHECK(compute("_operator.floordiv", {1.0, 0.1}).toDouble() == 9);
  CHECK(compute("_operator.floordiv", {-7.0, 2.0}).toDouble() == -4);
  CHECK(compute("_operator.floordiv", {6.0, 2.0}).toDouble() == 3);
  CHECK(compute("_operator.add", {int64_t{3}, 0.5}).toDouble() == 3.5);
  CHECK(compute("_operator.truediv", {int64_t{7}, int64_t{2}}).toDouble() == 3.5);
  CHECK(compute("_operator.pow", {int64_t{3}, int64_t{5}}).toInt() == 243);
  CHECK(compute("_operator.pow", {int64_t{2}, int64_t{-1}}).toDouble() == 0.5);
  CHECK(compute("_operator.ge", {int64_t{3}, int64_t{3}}).toBool());
  CHECK_FALSE(compute("_operator.lt", {3.0, int64_t{3}}).toBool());
  CHECK(compute("_operator.and_", {true, false}).toBool() == false);
  CHECK(compute("torch.sym_max", {int64_t{3}, int64_t{9}}).toInt() == 9);
  CHECK(compute("torch.sym_ite", {true, int64_t{1}, int64_t{2}}).toInt() == 1);
  CHECK(compute("torch.sym_not", {false}).toBool());
  CHECK(compute("math.trunc", {-2.7}).toInt() == -2);
  CHECK(compute("torch.sym_float", {int64_t{2}}).isDouble());
  CHECK_FALSE(number_function("_operator.setitem"));
}

TEST_CASE("Arithmetic on sizes neither wraps around nor divides by zero", "[export]") {
  for (const auto& [target, a, b] : {std::tuple{"_operator.add", INT64_MAX, int64_t{1}},
                                     std::tuple{"_operator.mul", INT64_MAX, int64_t{2}},
                                     std::tuple{"_operator.pow", int64_t{10}, int64_t{19}},
                                     std::tuple{"_operator.lshift", int64_t{1}, int64_t{70}},
                                     std::tuple{"_operator.floordiv", INT64_MIN, int64_t{-1}}}) {
    CHECK_THAT(message_of<ddp::DataError>([&] {
                 compute(target, {a, b});
               }),
               Contains("range of 64 bits"));
  }
  CHECK_THAT(message_of<ddp::DataError>([&] {
               compute("_operator.mod", {int64_t{1}, int64_t{0}});
             }),
             Contains("by zero"));
  CHECK_THAT(message_of<ddp::DataError>([&] { compute("_operator.add", {int64_t{1}}); }),
             Contains("1 operands, not 2"));
}

TEST_CASE("Expressions of sizes are read, computed and shown", "[export]") {
  const auto expression = ddp::detail::read_size_expression(
      "Add(Mul(Integer(2), Symbol('s0', positive=True, integer=True)), Integer(-1))");
  CHECK(ddp::detail::evaluate(expression, {{"s0", 5}}) == 9);
  CHECK(ddp::detail::evaluate(expression, {}) == std::nullopt);
  CHECK(ddp::detail::readable(expression) == "2*s0 + -1");
  const auto division = ddp::detail::read_size_expression("FloorDiv(Symbol('s0'), Integer(4))");
  CHECK(ddp::detail::evaluate(division, {{"s0", 11}}) == 2);
  CHECK(ddp::detail::evaluate(
            ddp::detail::read_size_expression("Strange(Symbol('s0'), Integer(4))"), {{"s0", 1}}) ==
        std::nullopt);
  std::string deep = "Integer(1)";
  for (int i = 0; i < 200; ++i) {
    deep = "Add(" + deep + ", Integer(1))";
  }
  for (const std::string& text : {std::string("Add("), std::string(""), std::string("Symbol('a)"),
                                  std::string("Add(Integer(1)) x"), deep}) {
    CHECK_THAT(message_of<ddp::DataError>([&] { ddp::detail::read_size_expression(text); }),
               Contains("not readable"));
  }
}

TEST_CASE("A size outside the export's range is refused by name", "[export]") {
  auto module = load(linear_relu());
  CHECK_NOTHROW(module->forward(at::zeros({8, 3})));
  CHECK_THAT(message_of<ddp::SettingsError>([&] {
               module->forward(at::zeros({9, 3}));
             }),
             Contains("input x, dimension 0") && Contains("is 9") && Contains("2 to 8") &&
                 Contains("dynamic_shapes"));
  CHECK_THAT(message_of<ddp::SettingsError>([&] {
               module->forward(at::zeros({1, 3}));
             }),
             Contains("is 1"));
  CHECK_THAT(message_of<ddp::SettingsError>([&] {
               module->forward(at::zeros({4, 5}));
             }),
             Contains("dimension 1") && Contains("is 5") && Contains("only 3"));
  CHECK_THAT(message_of<ddp::SettingsError>([&] { module->forward(at::zeros({4})); }),
             Contains("1 dimensions, and 2"));
  CHECK_THAT(message_of<ddp::SettingsError>([&] { module->forward(3); }),
             Contains("tensor at the export"));
}

TEST_CASE("An operator that fails on another dtype names the input", "[export]") {
  auto archive = linear_relu();
  archive.values["x"]["dtype"] = 7;
  auto module = load(archive);
  CHECK_THAT(message_of<c10::Error>([&] {
               module->forward(at::zeros({4, 3}, at::kDouble));
             }),
             Contains("input x has dtype Double, and Float at the export"));
  module->to(at::kDouble);
  CHECK_NOTHROW(module->forward(at::zeros({4, 3}, at::kDouble)));
}

TEST_CASE("Inputs that share a symbol have the same size", "[export]") {
  ArchiveBuilder archive;
  const Json twice = {
      {"as_expr", {{"expr_str", "Mul(Integer(2), Symbol('s0', positive=True, integer=True))"}}}};
  archive.input("a", {twice}).input("b", {symbol("s0")}).input("c", {symbol("s0")});
  archive
      .node("torch.ops.aten.add.Tensor", {{"self", tensor("b")}, {"other", tensor("c")}},
            {tensor("y")})
      .output(tensor("y"));
  auto module = load(archive);
  CHECK_NOTHROW(module->forward(at::zeros({6}), at::zeros({3}), at::zeros({3})));
  CHECK_THAT(
      message_of<ddp::SettingsError>(
          [&] { module->forward(at::zeros({6}), at::zeros({3}), at::zeros({1})); }),
      Contains("input c, dimension 0") && Contains("is 1, and that of input b, dimension 0 is 3"));
  CHECK_THAT(message_of<ddp::SettingsError>(
                 [&] { module->forward(at::zeros({7}), at::zeros({3}), at::zeros({3})); }),
             Contains("input a, dimension 0") && Contains("only 6 (2*s0)"));
}

TEST_CASE("An expression alone, and an integer, have ranges too", "[export]") {
  ArchiveBuilder archive;
  const Json twice = {
      {"as_expr", {{"expr_str", "Mul(Integer(2), Symbol('s0', positive=True, integer=True))"}}}};
  archive.input("a", {twice});
  archive.inputs.push_back(size_name("n"));
  archive.input_specs.push_back({{"user_input", {{"arg", size_name("n")}}}});
  archive.argument_names.push_back("n");
  archive.ranges["2*s0"] = {{"min_val", 4}, {"max_val", 8}};
  archive.ranges["s1"] = {{"min_val", 3}, {"max_val", nullptr}};
  archive.node("torch.ops.aten.mul.Tensor", {{"self", tensor("a")}, {"other", size_name("n")}},
               {tensor("y")});
  archive.output(tensor("y"));
  auto program = archive.program();
  program["graph_module"]["graph"]["sym_int_values"]["n"] = symbol("s1");
  const testing::TemporaryFolder folder;
  archive.write(folder.file("net.pt2"), program.dump());
  ddp::ExportedModule module(folder.file("net.pt2"));
  CHECK(at::equal(module->forward(at::ones({8}), 5).toTensor(), at::full({8}, 5.0F)));
  CHECK_THAT(message_of<ddp::SettingsError>([&] { module->forward(at::ones({10}), 5); }),
             Contains("4 to 8"));
  CHECK_THAT(message_of<ddp::SettingsError>([&] { module->forward(at::ones({8}), 2); }),
             Contains("at least 3"));
  CHECK_THAT(message_of<ddp::SettingsError>([&] { module->forward(at::ones({8}), 2.5); }),
             Contains("an integer"));
}

TEST_CASE("An operator's error names the node and the line of Python", "[export]") {
  ArchiveBuilder archive;
  archive.input("a", {symbol("s0")}).input("b", {symbol("s1")});
  archive
      .node("torch.ops.aten.add.Tensor", {{"self", tensor("a")}, {"other", tensor("b")}},
            {tensor("y")})
      .output(tensor("y"));
  auto module = load(archive);
  CHECK_THAT(message_of<c10::Error>([&] { module->forward(at::zeros({2}), at::zeros({3})); }),
             Contains("node node_0 (torch.ops.aten.add.Tensor)") && Contains("net.py\", line 7"));
}

TEST_CASE("A number where a tensor is expected does not promote", "[export]") {
  ArchiveBuilder archive;
  archive.input("x", {symbol("s0")});
  archive.node("torch.ops.aten.sym_size.int", {{"self", tensor("x")}, {"dim", integer(0)}},
               {size_name("n")});
  archive.node("_operator.mul", {{"a", size_name("n")}, {"b", integer(2)}}, {size_name("m")});
  archive.node("torch.ops.aten.mul.Tensor", {{"self", tensor("x")}, {"other", number(0.5)}},
               {tensor("y")});
  archive.node("torch.ops.aten.add.Tensor", {{"self", tensor("y")}, {"other", size_name("m")}},
               {tensor("z")});
  // Between tensors without dimensions, float32 would win over float16.
  archive.node("torch.ops.aten.sum.default", {{"self", tensor("x")}}, {tensor("sum")});
  archive.node("torch.ops.aten.mul.Tensor", {{"self", tensor("sum")}, {"other", number(0.5)}},
               {tensor("half_sum")});
  archive.output(tensor("z")).output(size_name("m")).output(tensor("half_sum"));
  const auto result = load(archive)->forward(at::ones({3}, at::kHalf));
  const auto& elements = result.toTupleRef().elements();
  CHECK(elements[0].toTensor().scalar_type() == at::kHalf);
  CHECK(at::equal(elements[0].toTensor(), at::full({3}, 6.5, at::kHalf)));
  CHECK(elements[1].toInt() == 6);
  CHECK(elements[2].toTensor().scalar_type() == at::kHalf);
}

TEST_CASE("Values are freed after their last use", "[export]") {
  ArchiveBuilder archive;
  archive.input("x", {symbol("s0")});
  archive.node("torch.ops.test_export.watch.default", {{"x", tensor("x")}}, {tensor("a")});
  archive.node("torch.ops.test_export.watch.default", {{"x", tensor("a")}}, {tensor("b")});
  archive.node("torch.ops.test_export.watch.default", {{"x", tensor("b")}}, {tensor("unused")});
  archive.node("torch.ops.test_export.watch.default", {{"x", tensor("b")}}, {tensor("c")})
      .output(tensor("c"));
  // The operator counts how many results of earlier calls are alive.
  static std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> results;
  static std::vector<int64_t> alive;
  const auto library =
      torch::Library(torch::Library::FRAGMENT, "test_export", std::nullopt, __FILE__, __LINE__);
  const auto definition = torch::RegisterOperators().op(
      "test_export::watch(Tensor x) -> Tensor", [](const at::Tensor& x) {
        alive.push_back(std::count_if(results.begin(), results.end(),
                                      [](const auto& result) { return !result.expired(); }));
        auto result = x + 1;
        results.emplace_back(result.getIntrusivePtr());
        return result;
      });
  const auto y = load(archive)->forward(at::zeros({2})).toTensor();
  CHECK(alive == std::vector<int64_t>{0, 1, 1, 1});
  CHECK(std::count_if(results.begin(), results.end(),
                      [](const auto& result) { return !result.expired(); }) == 1);
}

TEST_CASE("Keys of dicts are texts", "[export]") {
  const auto spec = ddp::detail::read_tree_spec(
      Json::array({1, container("builtins.dict", "[1]", Json::array({leaf()}))}).dump(), {});
  std::vector<c10::IValue> leaves;
  c10::impl::GenericDict texts(c10::StringType::get(), c10::AnyType::get());
  texts.insert("1", 5);
  ddp::detail::flatten(spec, texts, "x", leaves);
  CHECK(leaves.at(0).toInt() == 5);
  c10::impl::GenericDict numbers(c10::IntType::get(), c10::AnyType::get());
  numbers.insert(1, 5);
  CHECK_THAT(
      message_of<ddp::SettingsError>([&] { ddp::detail::flatten(spec, numbers, "x", leaves); }),
      Contains("x has a key of the type Int") && Contains("so 1 is \"1\""));
}
