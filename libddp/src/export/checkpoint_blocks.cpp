// SPDX-License-Identifier: Apache-2.0
#include "export/checkpoint_blocks.hpp"

#include <fnmatch.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

using Names = std::vector<std::string>;

void add_name(std::vector<Argument>& arguments, const std::string& name) {
  arguments.emplace_back().value.emplace<ValueName>(ValueName{name});
}

/// The outermost module around `path` that a pattern matches, and this pattern.
struct Match {
  std::string module;
  std::size_t pattern;
};

std::optional<Match> find_match(const std::string& path, const Names& patterns) {
  for (auto end = path.find('.');; end = path.find('.', end + 1)) {
    auto module = path.substr(0, end);
    for (std::size_t i = 0; i < patterns.size() && !module.empty(); ++i) {
      if (fnmatch(patterns[i].c_str(), module.c_str(), 0) == 0) {
        return Match{std::move(module), i};
      }
    }
    if (end == std::string::npos) {
      return std::nullopt;
    }
  }
}

// Arithmetic on sizes, which the export places between the calls of a module.
bool computes_sizes(const Node& node) {
  constexpr const char* kSizes[] = {"_operator.", "torch.sym_", "torch.ops.aten.sym_size.",
                                    "math."};
  return std::any_of(std::begin(kSizes), std::end(kSizes),
                     [&](const char* start) { return node.target.starts_with(start); });
}

// The end of the range of nodes from `begin` on that belong to `module`.
std::size_t end_of(const std::vector<Node>& nodes, std::size_t begin, const std::string& module,
                   const Names& patterns) {
  auto end = begin + 1;
  for (auto i = end; i < nodes.size(); ++i) {
    const auto match = find_match(nodes[i].module, patterns);
    if (match && match->module == module) {
      end = i + 1;
    } else if (!computes_sizes(nodes[i])) {
      break;
    }
  }
  return end;
}

/// Encloses ranges of a graph's nodes.
class Enclosure {
 public:
  explicit Enclosure(ExportedProgram& program) : graph_(program.graph) {
    for (std::size_t i = 0; i < program.inputs.size(); ++i) {
      const auto* name = program.graph.inputs[i].name();
      if (name != nullptr && program.inputs[i].kind == InputKind::Buffer) {
        buffers_.insert(name->name);
      }
    }
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      for (const auto& input : graph_.nodes[i].inputs) {
        visit_names(input.value, [&](const std::string& name) { last_use_[name] = i; });
      }
    }
    for (const auto& output : graph_.outputs) {
      visit_names(output, [&](const std::string& name) { last_use_[name] = graph_.nodes.size(); });
    }
  }

  /// Appends the nodes [begin, end) of the graph to `nodes` as one node.
  void enclose(std::size_t begin, std::size_t end, const std::string& module,
               std::vector<Node>& nodes) {
    auto inner = std::make_shared<Graph>();
    Names inputs, results;
    std::set<std::string> known;
    for (std::size_t i = begin; i < end; ++i) {
      for (const auto& input : graph_.nodes[i].inputs) {
        visit_names(input.value, [&](const std::string& name) {
          if (known.insert(name).second) {
            inputs.push_back(name);
          }
        });
      }
      for (const auto& output : graph_.nodes[i].outputs) {
        visit_names(output, [&](const std::string& name) {
          known.insert(name);
          if (const auto use = last_use_.find(name); use != last_use_.end() && use->second >= end) {
            results.push_back(name);
          }
        });
      }
    }
    if (results.empty()) {
      std::move(graph_.nodes.begin() + static_cast<std::ptrdiff_t>(begin),
                graph_.nodes.begin() + static_cast<std::ptrdiff_t>(end), std::back_inserter(nodes));
      return;
    }
    Node call;
    call.name = concat("checkpoint_", nodes.size());
    call.target = "torch.ops.higher_order.tag_activation_checkpoint";
    call.module = module;
    call.python_line = graph_.nodes[begin].python_line;
    call.inputs.emplace_back().value.value = std::shared_ptr<const Graph>(inner);
    for (const auto& name : inputs) {
      add_name(inner->inputs, name);
      if (buffers_.count(name) != 0) {
        inner->buffers.insert(name);
      }
      call.inputs.emplace_back().value.value.emplace<ValueName>(ValueName{name});
    }
    for (const auto& name : results) {
      add_name(inner->outputs, name);
      add_name(call.outputs, name);
    }
    inner->nodes.assign(
        std::make_move_iterator(graph_.nodes.begin() + static_cast<std::ptrdiff_t>(begin)),
        std::make_move_iterator(graph_.nodes.begin() + static_cast<std::ptrdiff_t>(end)));
    nodes.push_back(std::move(call));
  }

 private:
  Graph& graph_;
  std::set<std::string> buffers_;
  std::map<std::string, std::size_t> last_use_;  // the node's index
};

}  // namespace

std::vector<int> checkpoint_blocks(ExportedProgram& program, const Names& patterns) {
  std::vector<int> counts(patterns.size(), 0);
  std::vector<Node> nodes;
  auto& old_nodes = program.graph.nodes;
  Enclosure enclosure(program);
  for (std::size_t begin = 0; begin < old_nodes.size();) {
    const auto match = find_match(old_nodes[begin].module, patterns);
    if (!match) {
      nodes.push_back(std::move(old_nodes[begin++]));
      continue;
    }
    const auto end = end_of(old_nodes, begin, match->module, patterns);
    ++counts[match->pattern];
    enclosure.enclose(begin, end, match->module, nodes);
    begin = end;
  }
  old_nodes = std::move(nodes);
  return counts;
}

}  // namespace ddp::detail
