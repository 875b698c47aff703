// SPDX-License-Identifier: Apache-2.0
// The operands of a higher-order operator as the inputs of its graphs.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "export/graph.hpp"

namespace ddp::detail {

bool has_graph(const Node& node);

/// The values of arguments and of lists of them, in order; nullptr for constants.
std::vector<const ValueName*> flat_names(const std::vector<Argument>& arguments);

/// The values that a node passes to its graphs, in the order of the graphs' inputs. cond,
/// while_loop, scan and map pass lists of values, and the other operators the values themselves.
struct GraphOperands {
  std::vector<const Argument*> values;  ///< arguments of the node, or elements of its lists
  std::size_t num_shared = 0;           ///< the last ones: each run of a graph gets them unchanged

  std::span<const Argument* const> shared() const { return std::span(values).last(num_shared); }
};
GraphOperands graph_operands(const Node& node);

/// What is known of values, by the names that these have as inputs of the node's graph `inner`.
/// `first` is the first operand to look at.
template <typename Known>
std::map<std::string, Known> known_inside(const GraphOperands& operands, const Graph& inner,
                                          const std::map<std::string, Known>& known,
                                          std::size_t first = 0) {
  std::map<std::string, Known> inside;
  for (auto i = first; i < operands.values.size() && i < inner.inputs.size(); ++i) {
    const auto* outer_name = operands.values[i]->name();
    const auto* name = inner.inputs[i].name();
    const auto found = outer_name ? known.find(outer_name->name) : known.end();
    if (found != known.end() && name != nullptr) {
      inside.emplace(name->name, found->second);
    }
  }
  return inside;
}

}  // namespace ddp::detail
