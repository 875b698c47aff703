// SPDX-License-Identifier: Apache-2.0
#include "export/graph_operands.hpp"

#include <algorithm>

namespace ddp::detail {
namespace {

// invoke_subgraph has a text before its operands.
bool is_operand(const Argument& argument) {
  const auto* constant = argument.constant();
  return constant == nullptr || !constant->isString();
}

}  // namespace

bool has_graph(const Node& node) {
  return std::any_of(node.inputs.begin(), node.inputs.end(),
                     [](const NamedArgument& input) { return input.value.graph() != nullptr; });
}

GraphOperands graph_operands(const Node& node) {
  GraphOperands operands;
  for (const auto& input : node.inputs) {
    if (input.value.graph() != nullptr) {
      operands.values.clear();
    } else if (const auto* list = input.value.list()) {
      for (const auto& item : *list) {
        operands.values.push_back(&item);
      }
    } else if (is_operand(input.value)) {
      operands.values.push_back(&input.value);
    }
  }
  const auto* last_list = node.inputs.empty() ? nullptr : node.inputs.back().value.list();
  operands.num_shared = last_list ? last_list->size() : operands.values.size();
  return operands;
}

std::vector<const ValueName*> flat_names(const std::vector<Argument>& arguments) {
  std::vector<const ValueName*> names;
  for (const auto& argument : arguments) {
    if (const auto* list = argument.list()) {
      const auto inner = flat_names(*list);
      names.insert(names.end(), inner.begin(), inner.end());
    } else {
      names.push_back(argument.name());
    }
  }
  return names;
}

}  // namespace ddp::detail
