// SPDX-License-Identifier: Apache-2.0
#include "export/fusion/fusion.hpp"

#include <algorithm>
#include <memory>
#include <set>

#include "export/fusion/patterns.hpp"

namespace ddp::detail {
namespace {

void add_counts(std::map<std::string, int>& counts, const std::map<std::string, int>& more) {
  for (const auto& [name, count] : more) {
    counts[name] += count;
  }
}

// `state`: inputs that are parameters and buffers of the program.
std::map<std::string, int> fuse_graph(Graph& graph, const std::set<std::string>& state) {
  std::map<std::string, int> counts;
  for (auto& node : graph.nodes) {
    for (auto& input : node.inputs) {
      if (const auto* inner = input.value.graph()) {
        auto copy = std::make_shared<Graph>(**inner);
        add_counts(counts, fuse_graph(*copy, {}));
        input.value.value = std::shared_ptr<const Graph>(std::move(copy));
      }
    }
  }
  const bool reads_strides = std::any_of(
      graph.nodes.begin(), graph.nodes.end(),
      [](const Node& node) { return node.target.starts_with("torch.ops.aten.as_strided"); });
  if (reads_strides) {
    return counts;  // the ops choose strides of their own
  }
  FusionGraph fusion(graph, state);
  for (auto i = fusion.size(); i-- > 0;) {
    // First the patterns with a linear layer, which fuse_language would replace alone.
    if (!fusion.is_removed(i)) {
      fuse_vision(fusion, i) || fuse_loss(fusion, i) || fuse_attention(fusion, i) ||
          fuse_norm(fusion, i) || fuse_language(fusion, i) || fuse_decoder(fusion, i);
    }
  }
  add_counts(counts, fusion.finish());
  return counts;
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
  return fuse_graph(program.graph, state);
}

}  // namespace ddp::detail
