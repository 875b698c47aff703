// SPDX-License-Identifier: Apache-2.0
#include "export/fusion/fusion.hpp"

#include <algorithm>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "export/fusion/early_selection.hpp"
#include "export/fusion/graph_memory.hpp"
#include "export/fusion/joined_selections.hpp"
#include "export/fusion/pattern_arguments.hpp"
#include "export/fusion/patterns.hpp"

namespace ddp::detail {
namespace {

// Makes copies of the graphs in the graph's nodes. Adds it and these copies to `graphs`.
void collect(Graph& graph, std::vector<Graph*>& graphs) {
  graphs.push_back(&graph);
  for (auto& node : graph.nodes) {
    for (auto& input : node.inputs) {
      if (const auto* inner = input.value.graph()) {
        auto copy = std::make_shared<Graph>(**inner);
        collect(*copy, graphs);
        input.value.value = std::shared_ptr<const Graph>(std::move(copy));
      }
    }
  }
}

bool reads_strides(const Graph* graph) {
  return std::any_of(graph->nodes.begin(), graph->nodes.end(), [](const Node& node) {
    return node.target.starts_with("torch.ops.aten.as_strided");
  });
}

std::map<std::string, int> fuse_graph(Graph& graph, const GraphMemory& memory) {
  FusionGraph fusion(graph, memory);
  for (auto i = fusion.size(); i-- > 0;) {
    // First the patterns with a linear layer, which fuse_language would replace alone.
    if (!fusion.is_removed(i)) {
      fuse_vision(fusion, i) || fuse_loss(fusion, i) || fuse_attention(fusion, i) ||
          fuse_norm(fusion, i) || fuse_language(fusion, i) || fuse_decoder(fusion, i) ||
          fuse_layout(fusion, i);
    }
  }
  auto counts = fusion.finish();
  if (const int joined = join_selections(graph, memory); joined > 0) {
    counts["select_each"] = joined;
  }
  return counts;
}

// The ops' results may be channels last where the export recorded contiguous ones.
void relax_views(Graph& graph, const GraphMemory& memory) {
  for (auto& node : graph.nodes) {
    if (is_call_of(node, "view.default") && node.outputs.size() == 1 && node.outputs[0].name() &&
        !memory.of(node.outputs[0].name()->name).is_written_later) {
      node.target = "torch.ops.aten.reshape.default";
      for (auto& input : node.inputs) {
        input.name = input.name == "size" ? "shape" : input.name;
      }
    }
  }
}

}  // namespace

std::map<std::string, int> fuse(ExportedProgram& program) {
  std::set<std::string> state;
  for (std::size_t i = 0; i < program.inputs.size(); ++i) {
    const auto* name = program.graph.inputs[i].name();
    if (name != nullptr && program.inputs[i].is_state()) {
      state.insert(name->name);
    }
  }
  std::vector<Graph*> graphs;
  collect(program.graph, graphs);
  if (std::any_of(graphs.begin(), graphs.end(), reads_strides)) {
    return {};  // the ops choose strides of their own
  }
  auto memory = memory_of(program.graph, state);
  std::map<std::string, int> counts;
  for (auto* graph : graphs) {
    if (const int moved = select_rows_early(*graph, memory.at(graph)); moved > 0) {
      counts["select_row"] += moved;
    }
  }
  memory = counts.empty() ? std::move(memory) : memory_of(program.graph, state);
  for (auto* graph : graphs) {
    for (const auto& [name, count] : fuse_graph(*graph, memory.at(graph))) {
      counts[name] += count;
    }
  }
  for (auto* graph : counts.empty() ? std::vector<Graph*>() : graphs) {
    relax_views(*graph, memory.at(graph));
  }
  return counts;
}

}  // namespace ddp::detail
