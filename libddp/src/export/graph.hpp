// SPDX-License-Identifier: Apache-2.0
// A program of torch.export as the archive describes it: a list of operator calls on named values.
// (Python's torch/_export/serde/schema.py defines the JSON.)
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "export/tree_spec.hpp"

namespace ddp::detail {

struct Graph;

/// A value that an input or an earlier node defines.
struct ValueName {
  std::string name;
};

/// An argument or a result of a node.
struct Argument {
  using List = std::vector<Argument>;
  /// An IValue is a constant: None, a number, a text, a layout, a memory format or a device.
  std::variant<c10::IValue, ValueName, List, std::shared_ptr<const Graph>, at::ScalarType> value;

  const ValueName* name() const { return std::get_if<ValueName>(&value); }
  const c10::IValue* constant() const { return std::get_if<c10::IValue>(&value); }
  const at::ScalarType* dtype() const { return std::get_if<at::ScalarType>(&value); }
  /// A graph that a higher-order operator runs; nullptr for other arguments.
  const std::shared_ptr<const Graph>* graph() const {
    return std::get_if<std::shared_ptr<const Graph>>(&value);
  }
  const List* list() const { return std::get_if<List>(&value); }
};

/// Calls visit(name) for the value, or each value of the list, that the argument is.
template <typename Visit>
void visit_names(const Argument& argument, const Visit& visit) {
  if (const auto* name = argument.name()) {
    visit(name->name);
  } else if (const auto* list = argument.list()) {
    for (const auto& item : *list) {
      visit_names(item, visit);
    }
  }
}

struct NamedArgument {
  std::string name;  ///< in the operator's schema; empty for a higher-order operator
  Argument value;
};

/// Takes its arguments from the stack and leaves its results.
using FusedFunction = void (*)(std::vector<c10::IValue>& stack);

struct Node {
  std::string name;
  std::string target;  ///< "torch.ops.aten.linear.default", "_operator.mul", …
  std::vector<NamedArgument> inputs;
  std::vector<Argument> outputs;
  std::string python_line;  ///< "File "net.py", line 7, in forward"; empty if not recorded
  std::string module;       ///< the path of the module that made the call: "layers.0.attention"
  /// Runs instead of an operator; `target` is then the op's name (fusion/fusion.hpp).
  FusedFunction fused = nullptr;

  const Argument* input(std::string_view argument) const;  ///< nullptr if it is not given
  std::string describe() const;  ///< for messages: "node linear (torch.ops.aten.linear.default)…"
};

/// A dimension of an input: a number, or an expression of symbols (sympy's srepr).
struct Dimension {
  int64_t size = 0;
  std::string expression;  ///< empty: `size`
};

struct Graph {
  std::vector<Argument> inputs;  ///< names, or constants for inputs that the export fixed
  std::vector<Node> nodes;
  std::vector<Argument> outputs;
  std::map<std::string, std::vector<Dimension>> input_sizes;  ///< of tensors; of a number its value
  std::map<std::string, at::ScalarType> input_dtypes;  ///< of tensors, where the archive says it
  std::map<std::string, int64_t> ranks;  ///< dimensions of tensors, where the archive says them
  std::set<std::string> number_inputs;   ///< names of the inputs that are symbolic integers
  std::set<std::string> buffers;         ///< of a checkpointed block: inputs that are buffers
};

enum class InputKind { User, Constant, Parameter, Buffer, TensorConstant };
struct InputSpec {
  InputKind kind;
  std::string target;         ///< of a parameter, buffer or tensor constant
  bool is_persistent = true;  ///< of a buffer
  c10::IValue constant;       ///< of Constant

  bool is_state() const { return kind == InputKind::Parameter || kind == InputKind::Buffer; }
  bool is_argument() const { return kind == InputKind::User || kind == InputKind::Constant; }
};

enum class OutputKind { User, BufferMutation, ParameterMutation };
struct OutputSpec {
  OutputKind kind;
  std::string target;  ///< of a mutation: the buffer or parameter that it writes
};

struct Range {
  std::optional<int64_t> min, max;
};

struct ExportedProgram {
  Graph graph;
  at::DeviceType device = at::kCPU;     ///< that the export ran on
  std::vector<InputSpec> inputs;        ///< one per input of the graph
  std::vector<OutputSpec> outputs;      ///< one per output of the graph
  std::map<std::string, Range> ranges;  ///< by symbol
  TreeSpec in_spec, out_spec;
  std::vector<std::string> argument_names;  ///< of Python's forward
  std::vector<std::string> guards;          ///< conditions on sizes, in Python
};

/// Reads models/X.json. Throws DataError naming the node.
ExportedProgram read_program(const std::string& json);

}  // namespace ddp::detail
