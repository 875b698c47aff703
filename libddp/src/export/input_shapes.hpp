// SPDX-License-Identifier: Apache-2.0
// The sizes that an export allows for its inputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "export/graph.hpp"

namespace ddp::detail {

/// An expression of sizes in sympy's srepr form: Add(Integer(1), Symbol('s0', …)).
struct SizeExpression {
  std::string function;  ///< "Symbol", "Integer", "Add", "Mul", …
  std::string symbol;    ///< of a Symbol
  int64_t integer = 0;   ///< of an Integer
  std::vector<SizeExpression> arguments;
};

/// Throws DataError for a text that is no such expression.
SizeExpression read_size_expression(const std::string& text);

using SymbolValues = std::map<std::string, int64_t>;
/// Empty if it has an unknown symbol or function, or leaves the range of 64 bits.
std::optional<int64_t> evaluate(const SizeExpression& expression, const SymbolValues& symbols);
/// For messages: "2*s0 + 1".
std::string readable(const SizeExpression& expression);

/// Compares the inputs of a call with the sizes and ranges of the export.
class InputShapes {
 public:
  /// Throws DataError for an expression that it cannot read.
  explicit InputShapes(const ExportedProgram& program);

  /// `inputs` has one value per input of the graph. Throws SettingsError naming the input, the
  /// dimension, the value and the range.
  void check(const std::vector<c10::IValue>& inputs) const;
  /// For messages of operators that fail: inputs whose dtype differs from the export's. Usually
  /// empty.
  std::string other_dtypes(const std::vector<c10::IValue>& inputs) const;

 private:
  struct Size {
    int64_t size;
    std::optional<SizeExpression> expression;
  };
  struct Input {
    std::size_t index;  // in the graph's inputs
    std::string name;
    bool is_number;  // whose one "size" is its value
    std::vector<Size> sizes;
    std::optional<at::ScalarType> dtype;
  };
  /// The value of a symbol, and where it was first.
  struct Bound {
    int64_t value;
    std::string place;
  };
  static std::vector<int64_t> values_of(const Input& input, const c10::IValue& value);
  /// `symbol` is the text of a symbol or of an expression, which has a range of its own.
  void check_range(const std::string& where, const std::string& symbol, int64_t value,
                   std::map<std::string, Bound>& symbols) const;

  std::vector<Input> inputs_;
  std::map<std::string, Range> ranges_;
};

}  // namespace ddp::detail
