// SPDX-License-Identifier: Apache-2.0
#include "export/fusion/memory_groups.hpp"

#include <algorithm>

#include "export/buffer_aliases.hpp"
#include "export/graph_plan.hpp"

namespace ddp::detail {
namespace {

// What is no operator may return any of its arguments.
SharedMemory all_of(const Node& node) {
  SharedMemory shared;
  for (const auto& input : node.inputs) {
    shared.operands.push_back(&input.value);
  }
  for (const auto& output : node.outputs) {
    shared.results.push_back(&output);
  }
  return shared;
}

}  // namespace

MemoryGroups::MemoryGroups(const Graph& graph, const std::set<std::string>& separate) {
  std::string outside;
  for (const auto& input : graph.inputs) {
    visit_names(input, [&](const std::string& name) {
      index_of(name);
      if (separate.count(name) == 0) {
        join(name, outside.empty() ? name : outside);
        outside = name;
      }
    });
  }
  for (const auto& node : graph.nodes) {
    join_results(node);
  }
  for (auto& parent : parents_) {  // a parent stands before its children
    parent = parents_[parent];
  }
}

std::size_t MemoryGroups::index_of(const std::string& name) {
  const auto [found, is_new] = indices_.emplace(name, parents_.size());
  if (is_new) {
    parents_.push_back(parents_.size());
  }
  return found->second;
}

std::size_t MemoryGroups::root_of(std::size_t index) {
  while (parents_[index] != index) {
    index = parents_[index] = parents_[parents_[index]];
  }
  return index;
}

// The later name joins the earlier group.
void MemoryGroups::join(const std::string& a, const std::string& b) {
  const auto first = root_of(index_of(a)), second = root_of(index_of(b));
  parents_[std::max(first, second)] = std::min(first, second);
}

void MemoryGroups::join_results(const Node& node) {
  for (const auto& output : node.outputs) {
    visit_names(output, [&](const std::string& name) { index_of(name); });
  }
  const auto handle = find_operator(node.target);
  const auto shared = handle ? shared_memory(node, handle->schema()) : all_of(node);
  for (const auto* result : shared.results) {
    for (const auto* operand : shared.operands) {
      visit_names(*result, [&](const std::string& name) {
        visit_names(*operand, [&](const std::string& other) { join(name, other); });
      });
    }
  }
}

std::size_t MemoryGroups::of(const std::string& name) const {
  const auto found = indices_.find(name);
  return found == indices_.end() ? 0 : parents_[found->second];
}

std::set<std::size_t> MemoryGroups::of(const std::set<std::string>& names) const {
  std::set<std::size_t> groups;
  for (const auto& name : names) {
    groups.insert(of(name));
  }
  return groups;
}

}  // namespace ddp::detail
