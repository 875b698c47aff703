// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "export/graph.hpp"

namespace ddp::detail {

/// Where a value of a graph is made and read.
struct ValueUses {
  std::optional<std::size_t> source = {};   ///< no node: an input of the graph
  std::multiset<std::size_t> readers = {};  ///< one entry for each mention
  bool is_result = false;                   ///< of the graph
};

inline std::map<std::string, ValueUses> uses_of(const Graph& graph) {
  std::map<std::string, ValueUses> uses;
  for (const auto& input : graph.inputs) {
    visit_names(input, [&](const std::string& name) { uses[name]; });
  }
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    for (const auto& input : graph.nodes[i].inputs) {
      visit_names(input.value, [&](const std::string& name) { uses[name].readers.insert(i); });
    }
    for (const auto& output : graph.nodes[i].outputs) {
      visit_names(output, [&](const std::string& name) { uses[name].source = i; });
    }
  }
  for (const auto& output : graph.outputs) {
    visit_names(output, [&](const std::string& name) { uses[name].is_result = true; });
  }
  return uses;
}

}  // namespace ddp::detail
