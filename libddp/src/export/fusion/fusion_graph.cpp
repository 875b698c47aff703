// SPDX-License-Identifier: Apache-2.0
#include "export/fusion/fusion_graph.hpp"

#include <algorithm>
#include <functional>
#include <utility>

#include "export/buffer_aliases.hpp"
#include "export/fusion/early_selection.hpp"
#include "export/fusion/pattern_arguments.hpp"
#include "export/graph_plan.hpp"

namespace ddp::detail {
namespace {

constexpr std::size_t kLongestMove = 200;  // nodes; a hostile graph must not take minutes

// Sizes and their arithmetic are numbers.
bool makes_tensors(const Node& node) {
  const auto handle = find_operator(node.target);
  if (!handle) {
    return node.target.starts_with("torch.ops.");
  }
  const auto& results = handle->schema().returns();
  return !results.empty() && (results[0].type()->kind() == c10::TypeKind::TensorType ||
                              results[0].type()->kind() == c10::TypeKind::ListType);
}

void add_names(const Node& node, std::set<std::string>& names) {
  for (const auto& input : node.inputs) {
    visit_names(input.value, [&](const std::string& name) { names.insert(name); });
  }
}

// What a dropout that drops nothing returns, or a row of the CPU; nullptr: the node is neither.
const ValueName* returned_input(const Node& node) {
  if (node.target == kNarrowToRow) {
    return node.input("x")->name();
  }
  const bool is_plain = is_call_of(node, "dropout.default");
  if (!is_plain && !is_call_of(node, "dropout_.default")) {
    return nullptr;
  }
  const auto* input = node.input(is_plain ? "input" : "self");
  const bool drops =
      number_of(node.input("p"), 0.5) != 0 && truth_of(node.input("train"), true) != false;
  return drops || input == nullptr ? nullptr : input->name();
}

bool is_ascending(const std::vector<std::size_t>& nodes) {
  return std::adjacent_find(nodes.begin(), nodes.end(), std::greater_equal<>()) == nodes.end();
}

bool contains(const std::vector<std::size_t>& nodes, std::size_t node) {
  return std::find(nodes.begin(), nodes.end(), node) != nodes.end();
}

void rename_input(Node& node, const std::string& name, const std::string& other) {
  for (auto& input : node.inputs) {
    if (input.value.name() && input.value.name()->name == name) {
      input.value.value = ValueName{other};
    }
  }
}

std::set<std::size_t> groups_of(const GraphMemory& memory, const std::set<std::string>& names) {
  std::set<std::size_t> groups;
  for (const auto& name : names) {
    groups.insert(memory.of(name).group);
  }
  return groups;
}

bool meet(const std::set<std::size_t>& a, const std::set<std::size_t>& b) {
  return std::any_of(a.begin(), a.end(), [&](std::size_t group) { return b.count(group) != 0; });
}

}  // namespace

FusionGraph::FusionGraph(Graph& graph, const GraphMemory& memory)
    : graph_(graph), memory_(memory), values_(uses_of(graph)), removed_(graph.nodes.size(), false) {
  for (const auto* arguments : {&graph.inputs, &graph.outputs}) {
    for (const auto& argument : *arguments) {
      visit_names(argument,
                  [&](const std::string& name) { outside_.insert(memory.of(name).group); });
    }
  }
}

std::optional<std::size_t> FusionGraph::source(const Argument* value) const {
  const auto* name = value ? value->name() : nullptr;
  const auto found = name ? values_.find(name->name) : values_.end();
  if (found == values_.end() || !found->second.source) {
    return std::nullopt;
  }
  const bool is_only_result = graph_.nodes[*found->second.source].outputs.size() == 1;
  return is_only_result ? found->second.source : std::nullopt;
}

std::optional<std::size_t> FusionGraph::private_source(const Argument* value) const {
  const auto found = source(value);
  if (!found) {
    return std::nullopt;
  }
  const auto& uses = values_.at(value->name()->name);
  return !uses.is_result && uses.readers.size() == 1 ? found : std::nullopt;
}

std::optional<std::size_t> FusionGraph::private_call(const Argument* value,
                                                     std::string_view overload) const {
  const auto source = private_source(value);
  return source && is_call_of(at(*source), overload) ? source : std::nullopt;
}

bool FusionGraph::is_read_only_by(const Argument* value,
                                  const std::vector<std::size_t>& nodes) const {
  const auto* name = value ? value->name() : nullptr;
  const auto found = name ? values_.find(name->name) : values_.end();
  return found != values_.end() && !found->second.is_result &&
         std::all_of(found->second.readers.begin(), found->second.readers.end(),
                     [&](std::size_t reader) { return contains(nodes, reader); });
}

std::vector<std::size_t> FusionGraph::all_readers(const Argument* value) const {
  const auto* name = value ? value->name() : nullptr;
  const auto found = name ? values_.find(name->name) : values_.end();
  if (found == values_.end() || found->second.is_result) {
    return {};
  }
  return {found->second.readers.begin(), found->second.readers.end()};
}

bool FusionGraph::are_independent(std::size_t a, std::size_t b) const {
  const auto used_by = [this](std::size_t i) {
    std::set<std::string> names;
    add_names(graph_.nodes[i], names);
    auto used = groups_of(memory_, names);
    used.insert(memory_.written[i].begin(), memory_.written[i].end());
    return used;
  };
  return !meet(memory_.written[a], used_by(b)) && !meet(memory_.written[b], used_by(a));
}

// Autograd does not see an operator that returns its input.
std::set<std::string> FusionGraph::tensors_read(std::size_t i) const {
  std::set<std::string> names, tensors;
  if (returned_input(graph_.nodes[i]) == nullptr) {
    add_names(graph_.nodes[i], names);
  }
  for (auto name : names) {
    for (auto found = values_.find(name); found != values_.end() && found->second.source;
         found = values_.find(name)) {
      const auto* input = returned_input(graph_.nodes[*found->second.source]);
      if (input == nullptr) {
        break;
      }
      name = input->name;
    }
    tensors.insert(name);
  }
  return tensors;
}

// The matched nodes run later than they stood, so no node between may write memory that they read,
// or use memory that they write. If it reads what they read, the backward would sum the gradients
// of that in another order.
bool FusionGraph::may_move(const std::vector<std::size_t>& matched) const {
  if (matched.back() - matched.front() > kLongestMove) {
    return false;
  }
  std::set<std::string> names, tensors;
  std::set<std::size_t> written;
  for (const auto i : matched) {
    add_names(graph_.nodes[i], names);
    tensors.merge(tensors_read(i));
    written.insert(memory_.written[i].begin(), memory_.written[i].end());
  }
  auto used = groups_of(memory_, names);
  used.insert(written.begin(), written.end());
  const auto is_read_by_them = [&](const std::string& name) {
    return tensors.count(name) != 0 && !is_number({ValueName{name}});
  };
  for (auto i = matched.front(); i < matched.back(); ++i) {
    if (contains(matched, i)) {
      continue;
    }
    std::set<std::string> read;
    add_names(graph_.nodes[i], read);
    const auto read_tensors = tensors_read(i);
    if (meet(groups_of(memory_, read), written) || meet(memory_.written[i], used) ||
        std::any_of(read_tensors.begin(), read_tensors.end(), is_read_by_them)) {
      return false;
    }
  }
  return true;
}

bool FusionGraph::is_number(const Argument& value) const {
  const auto* name = value.name();
  const auto found = name ? values_.find(name->name) : values_.end();
  if (found == values_.end() || graph_.number_inputs.count(found->first) != 0) {
    return true;
  }
  const auto source = found->second.source;
  return source && !makes_tensors(graph_.nodes[*source]);
}

bool FusionGraph::is_written_later(const std::string& value) const {
  return memory_.of(value).is_written_later;
}

bool FusionGraph::is_shared_outside(const std::string& value) const {
  return outside_.contains(memory_.of(value).group);
}

bool FusionGraph::replace(const std::vector<std::size_t>& matched, FusedCall call) {
  const auto last = matched.back();
  const auto& results = graph_.nodes[last].outputs;
  if (!is_ascending(matched) || results.size() != 1 || !results[0].name() || !may_move(matched)) {
    return false;
  }
  if (call.changes_strides && memory_.of(results[0].name()->name).has_fixed_strides) {
    return false;
  }
  const auto passed_to = other_readers(call.passes_on, matched);
  const auto passed = values_.find(call.passes_on);
  const bool is_made =
      passed != values_.end() && passed->second.source && contains(matched, *passed->second.source);
  if (is_made && !passed_to) {
    return false;
  }
  for (const auto i : matched) {
    removed_[i] = i != last;
    for (const auto& input : graph_.nodes[i].inputs) {
      visit_names(input.value, [&](const std::string& name) { values_[name].readers.erase(i); });
    }
  }
  auto& node = graph_.nodes[last];
  node.fused = call.function;
  node.target = call.name;
  node.inputs = std::move(call.inputs);
  for (const auto& input : node.inputs) {
    visit_names(input.value, [&](const std::string& name) { values_[name].readers.insert(last); });
  }
  if (call.forks) {
    fork_result(last);
  } else if (passed_to && !passed_to->empty()) {
    // A value that a removed node made keeps its name.
    add_result(last, call.passes_on,
               is_made ? call.passes_on : call.passes_on + "." + node.outputs[0].name()->name,
               *passed_to);
  }
  ++counts_[call.name];
  return true;
}

// Whether the reader neither writes the value nor returns a view of it.
bool FusionGraph::reads_plainly(std::size_t reader, const std::string& name) const {
  const auto& node = graph_.nodes[reader];
  if (node.fused != nullptr) {
    return true;
  }
  const auto handle = find_operator(node.target);
  if (!handle || is_unmarked_view(handle->schema())) {
    return false;
  }
  int mentions = 0;
  for (const auto& argument : handle->schema().arguments()) {
    const auto* given = node.input(argument.name());
    const auto* given_name = given ? given->name() : nullptr;
    if (given_name != nullptr && given_name->name == name) {
      ++mentions;
      if (argument.alias_info() != nullptr) {
        return false;
      }
    }
  }
  return mentions == 1;
}

void FusionGraph::fork_result(std::size_t last) {
  const auto name = graph_.nodes[last].outputs[0].name()->name;
  const auto& value = values_[name];
  if (value.is_result || value.readers.size() != 2) {
    return;
  }
  const auto first = *value.readers.begin(), second = *value.readers.rbegin();
  if (first != second && reads_plainly(first, name) && reads_plainly(second, name)) {
    add_result(last, name, name + ".fork", {second});
  }
}

// Readers of the value other than the matched nodes. Empty: they cannot read a second result.
std::optional<std::set<std::size_t>> FusionGraph::other_readers(
    const std::string& value, const std::vector<std::size_t>& matched) const {
  const auto found = values_.find(value);
  if (found == values_.end() || found->second.is_result) {
    return std::nullopt;
  }
  std::set<std::size_t> others;
  for (const auto reader : found->second.readers) {
    if (!contains(matched, reader)) {
      if (reader < matched.back() || !reads_plainly(reader, value)) {
        return std::nullopt;
      }
      others.insert(reader);
    }
  }
  return others;
}

// The node's second result takes the place of the value for these readers, under the name `twin`.
void FusionGraph::add_result(std::size_t last, const std::string& value, std::string twin,
                             const std::set<std::size_t>& readers) {
  while (twin != value && values_.count(twin) != 0) {
    twin += '.';
  }
  for (const auto reader : readers) {
    values_[value].readers.erase(reader);
    rename_input(graph_.nodes[reader], value, twin);
  }
  graph_.nodes[last].outputs.push_back({ValueName{twin}});
  values_[twin] = {.source = last, .readers = {readers.begin(), readers.end()}};
}

std::map<std::string, int> FusionGraph::finish() {
  std::vector<Node> nodes;
  for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
    if (!removed_[i]) {
      nodes.push_back(std::move(graph_.nodes[i]));
    }
  }
  graph_.nodes = std::move(nodes);
  return std::move(counts_);
}

}  // namespace ddp::detail
