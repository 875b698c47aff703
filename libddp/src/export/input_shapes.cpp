// SPDX-License-Identifier: Apache-2.0
#include "export/input_shapes.hpp"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cctype>
#include <string_view>

#include "core/settings/parse_number.hpp"
#include "ddp/core/error.hpp"
#include "ddp/export/exported_module.hpp"
#include "export/stack_functions.hpp"
#include "export/text_scanner.hpp"

namespace ddp::detail {
namespace {

constexpr int kMaxExpressionDepth = 100;

// NAME(argument, …): an argument is such an expression, a quoted text, a number, or NAME=value,
// which says what sympy assumes of a symbol.
class ExpressionReader : private TextScanner {
 public:
  explicit ExpressionReader(std::string_view text) : TextScanner(text) {}

  SizeExpression read_all() {
    auto expression = read(0);
    if (!rest_.empty()) {
      fail();
    }
    return expression;
  }

 private:
  [[noreturn]] static void fail() { throw DataError("the expression of a size is not readable"); }

  std::string_view word() {
    return take_while([](char character) {
      return std::isalnum(static_cast<unsigned char>(character)) != 0 || character == '_' ||
             character == '-' || character == '.';
    });
  }

  std::string quoted() {
    const auto text = take_until("'");
    if (!text) {
      fail();
    }
    return std::string(*text);
  }

  void read_argument(SizeExpression& expression, int depth) {
    if (take("'")) {
      expression.symbol = quoted();
      return;
    }
    auto before = rest_;
    const auto name = word();
    if (take("=")) {
      word();
      return;
    }
    if (const auto number = parse_number<int64_t>(name)) {
      expression.integer = *number;
      return;
    }
    rest_ = before;
    expression.arguments.push_back(read(depth + 1));
  }

  SizeExpression read(int depth) {
    SizeExpression expression;
    expression.function = std::string(word());
    if (expression.function.empty() || depth > kMaxExpressionDepth) {
      fail();
    }
    if (!take("(")) {
      return expression;  // a constant of sympy, for example int_oo
    }
    while (!take(")")) {
      read_argument(expression, depth);
      if (!take(",") && !rest_.starts_with(')')) {
        fail();
      }
    }
    return expression;
  }
};

// The same arithmetic as on the sizes in the graph.
std::optional<int64_t> apply(const std::string& function, int64_t a, int64_t b) {
  static const std::map<std::string, std::string> kTargets = {
      {"Add", "_operator.add"},       {"Mul", "_operator.mul"},
      {"Max", "torch.sym_max"},       {"Min", "torch.sym_min"},
      {"Mod", "_operator.mod"},       {"FloorDiv", "_operator.floordiv"},
      {"PythonMod", "_operator.mod"}, {"CleanDiv", "_operator.floordiv"},
  };
  const auto target = kTargets.find(function);
  if (target == kTargets.end()) {
    return std::nullopt;
  }
  try {
    ValueStack stack = {a, b};
    number_function(target->second)(stack, {at::kCPU});
    return stack[0].toInt();
  } catch (const DataError&) {
    return std::nullopt;  // out of range, or a division by zero
  }
}

// "input x, dimension 0"
std::string place(const std::string& input, std::size_t dimension) {
  return concat("input ", printable(input), ", dimension ", dimension);
}

std::string words(const Range& range) {
  return range.max ? concat(range.min.value_or(0), " to ", *range.max)
                   : concat("at least ", range.min.value_or(0));
}

}  // namespace

SizeExpression read_size_expression(const std::string& text) {
  return ExpressionReader(text).read_all();
}

std::optional<int64_t> evaluate(const SizeExpression& expression, const SymbolValues& symbols) {
  if (expression.function == "Integer") {
    return expression.integer;
  }
  if (expression.function == "Symbol") {
    const auto found = symbols.find(expression.symbol);
    return found == symbols.end() ? std::nullopt : std::optional(found->second);
  }
  std::optional<int64_t> result;
  for (const auto& argument : expression.arguments) {
    const auto value = evaluate(argument, symbols);
    if (!value) {
      return std::nullopt;
    }
    result = &argument == &expression.arguments.front()
                 ? value
                 : apply(expression.function, *result, *value);
    if (!result) {
      return std::nullopt;
    }
  }
  return expression.arguments.size() < 2 ? std::nullopt : result;
}

std::string readable(const SizeExpression& expression) {
  if (expression.function == "Integer") {
    return concat(expression.integer);
  }
  if (expression.function == "Symbol") {
    return printable(expression.symbol);
  }
  const bool is_sum = expression.function == "Add", is_product = expression.function == "Mul";
  std::string text = is_sum || is_product ? "" : printable(expression.function) + "(";
  for (const auto& argument : expression.arguments) {
    const bool is_first = &argument == &expression.arguments.front();
    text += concat(is_first ? "" : is_sum ? " + " : is_product ? "*" : ", ", readable(argument));
  }
  return text + (is_sum || is_product ? "" : ")");
}

InputShapes::InputShapes(const ExportedProgram& program) : ranges_(program.ranges) {
  for (std::size_t i = 0; i < program.inputs.size(); ++i) {
    const auto* name = program.graph.inputs[i].name();
    const auto sizes =
        name ? program.graph.input_sizes.find(name->name) : program.graph.input_sizes.end();
    if (program.inputs[i].kind != InputKind::User || sizes == program.graph.input_sizes.end()) {
      continue;
    }
    Input input{i, name->name, program.graph.number_inputs.count(name->name) != 0, {}, {}};
    if (const auto dtype = program.graph.input_dtypes.find(name->name);
        dtype != program.graph.input_dtypes.end()) {
      input.dtype = dtype->second;
    }
    for (const auto& dimension : sizes->second) {
      input.sizes.push_back(
          {dimension.size, dimension.expression.empty()
                               ? std::nullopt
                               : std::optional(read_size_expression(dimension.expression))});
    }
    inputs_.push_back(std::move(input));
  }
}

void InputShapes::check_range(const std::string& where, const std::string& symbol, int64_t value,
                              std::map<std::string, Bound>& symbols) const {
  const auto& bound = symbols.try_emplace(symbol, Bound{value, where}).first->second;
  if (bound.value != value) {
    throw InputSizeError(concat(where, ": the size is ", value, ", and that of ", bound.place,
                                " is ", bound.value, ", but the export has the same (", symbol,
                                ") in both places; fix: pass equal sizes"));
  }
  const auto range = ranges_.find(symbol);
  if (range != ranges_.end() &&
      (value < range->second.min.value_or(0) || value > range->second.max.value_or(INT64_MAX))) {
    throw InputSizeError(concat(
        where, ": the size is ", value, ", and the export allows ", words(range->second),
        "; fix: pass such a size (a loader with drop_last leaves out a smaller last batch), or "
        "export with a wider range in dynamic_shapes"));
  }
}

// The sizes of a tensor, or the one value of a number.
std::vector<int64_t> InputShapes::values_of(const Input& input, const c10::IValue& value) {
  const auto name = printable(input.name);
  if (input.is_number) {
    if (!value.isInt()) {
      throw SettingsError(
          concat("input ", name, " is an integer at the export, not a ", value.tagKind()));
    }
    return {value.toInt()};
  }
  if (!value.isTensor() || !value.toTensor().defined()) {
    throw SettingsError(concat("input ", name, " is a tensor at the export; this one is ",
                               value.isTensor() ? "undefined" : "a " + value.tagKind()));
  }
  const auto sizes = value.toTensor().sizes();
  if (sizes.size() != input.sizes.size()) {
    throw InputSizeError(concat("input ", name, " has ", sizes.size(), " dimensions, and ",
                                input.sizes.size(), " at the export"));
  }
  return sizes.vec();
}

void InputShapes::check(const std::vector<c10::IValue>& inputs) const {
  std::map<std::string, Bound> bounds;
  for (const auto& input : inputs_) {
    const auto sizes = values_of(input, inputs[input.index]);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (const auto& expression = input.sizes[i].expression) {
        check_range(place(input.name, i), readable(*expression), sizes[i], bounds);
      }
    }
  }
  SymbolValues symbols;
  for (const auto& [symbol, bound] : bounds) {
    symbols.emplace(symbol, bound.value);
  }
  for (const auto& input : inputs_) {  // expressions, now that their symbols are known
    const auto sizes = values_of(input, inputs[input.index]);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const auto& expression = input.sizes[i].expression;
      const auto expected = expression ? evaluate(*expression, symbols) : input.sizes[i].size;
      if (expected && *expected != sizes[i]) {
        throw InputSizeError(concat(
            place(input.name, i), ": the size is ", sizes[i], ", and the export allows only ",
            *expected, expression ? " (" + readable(*expression) + ")" : "",
            "; fix: pass this size, or name the dimension in dynamic_shapes when you export"));
      }
    }
  }
}

std::string InputShapes::other_dtypes(const std::vector<c10::IValue>& inputs) const {
  std::string said;
  for (const auto& input : inputs_) {
    const auto& value = inputs[input.index];
    if (input.dtype && value.isTensor() && value.toTensor().scalar_type() != *input.dtype) {
      said += concat(said.empty() ? "" : ", ", "input ", printable(input.name), " has dtype ",
                     value.toTensor().scalar_type(), ", and ", *input.dtype, " at the export");
    }
  }
  return said;
}

}  // namespace ddp::detail
