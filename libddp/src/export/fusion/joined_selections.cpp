// SPDX-License-Identifier: Apache-2.0
#include "export/fusion/joined_selections.hpp"

#include <torch/library.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "export/fusion/pattern_arguments.hpp"
#include "export/fusion/value_uses.hpp"
#include "ops/layout/layout.hpp"

namespace ddp::detail {
namespace {

TORCH_LIBRARY_FRAGMENT(libddp, library) {
  library.def("select_each(Tensor(a) self, int dim, int count) -> Tensor(a)[]",
              ops::detail::select_rows);
}

// The nodes that read the value, by the index that each selects along one dimension. Empty: they do
// other things, or leave one out.
std::map<int64_t, std::size_t> selections_of(const Graph& graph, const ValueUses& uses) {
  std::map<int64_t, std::size_t> nodes;
  std::set<int64_t> dims;
  for (const auto i : uses.readers) {
    const auto& node = graph.nodes[i];
    const auto index = integer_of(node.input("index"), kNoInteger);
    if (node.fused != nullptr || !is_call_of(node, "select.int") || node.outputs.size() != 1 ||
        !is_value(&node.outputs[0]) || !nodes.emplace(index, i).second) {
      return {};
    }
    dims.insert(integer_of(node.input("dim"), kNoInteger));
  }
  const bool are_all = nodes.size() > 1 && nodes.begin()->first == 0 &&
                       nodes.rbegin()->first + 1 == static_cast<int64_t>(nodes.size());
  const bool is_one_dim = dims.size() == 1 && *dims.begin() != kNoInteger;
  return are_all && is_one_dim && !uses.is_result ? nodes : std::map<int64_t, std::size_t>();
}

// Autograd refuses to write views that one call made together. Who gets a result may write it.
bool may_be_written(const Graph& graph, const std::map<int64_t, std::size_t>& nodes,
                    const GraphMemory& memory, const std::set<std::size_t>& returned) {
  return std::any_of(nodes.begin(), nodes.end(), [&](const auto& selected) {
    const auto part = memory.of(graph.nodes[selected.second].outputs[0].name()->name);
    return part.is_written_later || returned.contains(part.group);
  });
}

// The memory of the graph's results, in groups.
std::set<std::size_t> returned_groups(const Graph& graph, const GraphMemory& memory) {
  std::set<std::size_t> groups;
  for (const auto& output : graph.outputs) {
    visit_names(output, [&](const std::string& name) { groups.insert(memory.of(name).group); });
  }
  return groups;
}

}  // namespace

int join_selections(Graph& graph, const GraphMemory& memory) {
  const auto returned = returned_groups(graph, memory);
  std::set<std::size_t> removed;
  int joined = 0;
  for (const auto& [name, uses] : uses_of(graph)) {
    const auto selections = selections_of(graph, uses);
    if (selections.empty() || may_be_written(graph, selections, memory, returned)) {
      continue;
    }
    Argument::List parts;
    for (const auto& [index, i] : selections) {
      parts.push_back(graph.nodes[i].outputs[0]);
      removed.insert(i);
    }
    const auto first = *uses.readers.begin();  // it runs before all that read a part
    removed.erase(first);
    auto& node = graph.nodes[first];
    node.target = "torch.ops.libddp.select_each.default";
    node.inputs = {{"self", *node.input("self")},
                   {"dim", *node.input("dim")},
                   {"count", {c10::IValue(static_cast<int64_t>(parts.size()))}}};
    node.outputs = {{std::move(parts)}};
    ++joined;
  }
  std::vector<Node> nodes;
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    if (!removed.contains(i)) {
      nodes.push_back(std::move(graph.nodes[i]));
    }
  }
  graph.nodes = std::move(nodes);
  return joined;
}

}  // namespace ddp::detail
