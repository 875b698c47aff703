// SPDX-License-Identifier: Apache-2.0
#include "export/fusion/graph_memory.hpp"

#include <algorithm>
#include <iterator>

#include "export/buffer_aliases.hpp"
#include "export/fusion/pattern_arguments.hpp"
#include "export/graph_operands.hpp"
#include "export/graph_plan.hpp"

namespace ddp::detail {
namespace {

using Value = std::size_t;  // of the whole program
using Values = std::vector<Value>;
constexpr Value kUnknown = 0, kRandomState = 1;

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

std::vector<const Argument*> all_written_arguments(const Node& node) {
  const bool is_known = find_operator(node.target) || !node.target.starts_with("torch.ops.");
  auto written = is_known ? written_arguments(node) : all_of(node).operands;
  // Batch norms write their running estimates, which the schema does not say.
  const bool is_norm = node.target.find("_norm") != std::string::npos;
  for (const auto& input : node.inputs) {
    if (is_norm && input.name.starts_with("running_")) {
      written.push_back(&input.value);
    }
  }
  return written;
}

// Whether the operator draws random numbers, in the order of the calls.
bool draws(const Node& node) {
  const auto handle = find_operator(node.target);
  return handle && handle->hasTag(at::Tag::nondeterministic_seeded) && dropout_p_of(node) != 0.0;
}

// Whether the operator returns a view or a copy, by the strides of its operand. (A view becomes a
// reshape: see relax_views().)
bool depends_on_strides(const Node& node) {
  return is_call_of(node, "view.default") || is_call_of(node, "reshape.default") ||
         is_call_of(node, "flatten.using_ints") || is_call_of(node, "contiguous.default");
}

std::vector<const Graph*> graphs_of(const Node& node) {
  std::vector<const Graph*> graphs;
  for (const auto& input : node.inputs) {
    if (const auto* graph = input.value.graph()) {
      graphs.push_back(graph->get());
    }
  }
  return graphs;
}

/// Goes through the nodes of all graphs in the order in which they run.
class MemoryAnalysis {
 public:
  std::map<const Graph*, GraphMemory> run(const Graph& graph, const std::set<std::string>& state) {
    Values inputs;
    const auto outside = add_value();
    for (const auto& input : graph.inputs) {
      inputs.push_back(add_value());
      if (input.name() == nullptr || state.count(input.name()->name) == 0) {
        join(inputs.back(), outside);
      }
    }
    steps_.push_back({.results = inputs});
    visit(graph, inputs);
    return conclusions();
  }

 private:
  /// A node, or the start or end of a graph.
  struct Step {
    Values reads = {}, results = {}, written = {};
    bool depends_on_strides = false;
  };
  struct Scope {
    std::map<std::string, Value> values = {};
    std::vector<Values> written = {};  // by node
  };

  Value add_value() {
    parents_.push_back(parents_.size());
    return parents_.back();
  }

  Value root_of(Value value) {
    while (parents_[value] != value) {
      value = parents_[value] = parents_[parents_[value]];
    }
    return value;
  }

  void join(Value a, Value b) {
    const auto first = root_of(a), second = root_of(b);
    parents_[std::max(first, second)] = std::min(first, second);
  }

  void join_all(const Values& values, Value other) {
    for (const auto value : values) {
      join(value, other);
    }
  }

  // A constant is a value of its own.
  Value value_of(const ValueName* name, const Scope& scope) {
    if (name == nullptr) {
      return add_value();
    }
    const auto found = scope.values.find(name->name);
    return found == scope.values.end() ? kUnknown : found->second;
  }

  void append(const Argument& argument, const Scope& scope, Values& values) {
    visit_names(argument, [&](const std::string& name) {
      const ValueName value{name};
      values.push_back(value_of(&value, scope));
    });
  }

  Values values_of(const std::vector<const Argument*>& arguments, const Scope& scope) {
    Values values;
    for (const auto* argument : arguments) {
      append(*argument, scope, values);
    }
    return values;
  }

  Values outputs_of(const Graph& graph, const Scope& scope) {
    Values outputs;
    for (const auto* name : flat_names(graph.outputs)) {
      outputs.push_back(value_of(name, scope));
    }
    return outputs;
  }

  Values add_results(const Node& node, Scope& scope) {
    Values results;
    for (const auto* name : flat_names(node.outputs)) {
      results.push_back(add_value());
      if (name != nullptr) {
        scope.values[name->name] = results.back();
      }
    }
    return results;
  }

  // Returns what the graph's nodes write.
  Values visit(const Graph& graph, const Values& inputs) {
    auto& scope = scopes_[&graph];
    for (std::size_t i = 0; i < graph.inputs.size(); ++i) {
      if (const auto* name = graph.inputs[i].name()) {
        scope.values[name->name] = inputs[i];
      }
    }
    Values all;
    for (const auto& node : graph.nodes) {
      scope.written.push_back(has_graph(node) ? visit_region(node, scope)
                                              : visit_operator(node, scope));
      all.insert(all.end(), scope.written.back().begin(), scope.written.back().end());
    }
    return all;
  }

  // Any strides of such a value allow the view.
  bool is_flat_pixel(const Node& node, const Scope& scope) {
    const auto* x = node.input("self");
    return is_call_of(node, "flatten.using_ints") && integer_of(node.input("start_dim"), 0) == 1 &&
           x != nullptr && single_pixels_.contains(value_of(x->name(), scope));
  }

  Values visit_operator(const Node& node, Scope& scope) {
    Step step{.reads = values_of(all_of(node).operands, scope),
              .results = add_results(node, scope),
              .written = values_of(all_written_arguments(node), scope),
              .depends_on_strides = depends_on_strides(node) && !is_flat_pixel(node, scope)};
    if (pools_to_one_pixel(node)) {
      single_pixels_.insert(step.results.begin(), step.results.end());
    }
    if (draws(node)) {
      step.written.push_back(kRandomState);
    }
    const auto handle = find_operator(node.target);
    const auto shared = handle ? shared_memory(node, handle->schema()) : all_of(node);
    auto values = values_of(shared.operands, scope);
    if (const auto results = values_of(shared.results, scope);
        !values.empty() && !results.empty()) {
      values.insert(values.end(), results.begin(), results.end());
      join_all(values, results.front());
    }
    steps_.push_back(step);
    return step.written;
  }

  Values visit_region(const Node& node, Scope& scope) {
    const auto graphs = graphs_of(node);
    const auto operands = graph_operands(node);
    Values inputs;
    for (const auto* operand : operands.values) {
      inputs.push_back(value_of(operand->name(), scope));
    }
    const auto results = add_results(node, scope);
    const bool runs_once = operands.num_shared == inputs.size() &&
                           std::all_of(graphs.begin(), graphs.end(), [&](const Graph* graph) {
                             return graph->inputs.size() == inputs.size() &&
                                    flat_names(graph->outputs).size() == results.size();
                           });
    return runs_once ? visit_once(graphs, inputs, results) : visit_loop(graphs, inputs, results);
  }

  // The graphs' inputs are the operands, and their outputs the results.
  Values visit_once(const std::vector<const Graph*>& graphs, const Values& inputs,
                    const Values& results) {
    Values written;
    std::vector<Step> ends(results.size());
    for (const auto* graph : graphs) {
      const auto more = visit(*graph, inputs);
      written.insert(written.end(), more.begin(), more.end());
      const auto outputs = outputs_of(*graph, scopes_[graph]);
      for (std::size_t i = 0; i < results.size(); ++i) {
        join(results[i], outputs[i]);
        ends[i].reads.push_back(outputs[i]);
        ends[i].results = {results[i]};
      }
    }
    steps_.insert(steps_.end(), ends.begin(), ends.end());
    return written;
  }

  // A run may get what another run returns, or a part of it.
  Values visit_loop(const std::vector<const Graph*>& graphs, const Values& operands,
                    const Values& results) {
    const auto all = add_value();
    join_all(operands, all);
    join_all(results, all);
    const auto start = steps_.size();
    steps_.push_back({.reads = operands});
    Step end{.reads = operands, .results = results};
    for (const auto* graph : graphs) {
      Values inputs;
      std::generate_n(std::back_inserter(inputs), graph->inputs.size(),
                      [&] { return add_value(); });
      join_all(inputs, all);
      steps_[start].results.insert(steps_[start].results.end(), inputs.begin(), inputs.end());
      const auto written = visit(*graph, inputs);
      end.written.insert(end.written.end(), written.begin(), written.end());
      const auto outputs = outputs_of(*graph, scopes_[graph]);
      join_all(outputs, all);
      for (auto* reads : {&steps_[start].reads, &end.reads}) {
        reads->insert(reads->end(), outputs.begin(), outputs.end());
      }
    }
    steps_.push_back(end);  // all writes follow each node of the run before
    return end.written;
  }

  std::map<const Graph*, GraphMemory> conclusions() {
    std::vector<ValueMemory> values(parents_.size());
    for (Value value = 0; value < values.size(); ++value) {
      values[value].group = root_of(value);
    }
    find_later_writes(values);
    std::map<const Graph*, GraphMemory> memory;
    for (const auto& [graph, scope] : scopes_) {
      auto& known = memory[graph];
      for (const auto& [name, value] : scope.values) {
        known.values[name] = values[value];
      }
      for (const auto& written : scope.written) {
        auto& groups = known.written.emplace_back();
        for (const auto value : written) {
          groups.insert(values[value].group);
        }
      }
    }
    return memory;
  }

  // Operators pass the strides of their operands on.
  void find_later_writes(std::vector<ValueMemory>& values) const {
    std::set<std::size_t> later;  // groups
    std::vector<const Step*> makers(values.size(), nullptr);
    Values pending;
    for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
      bool is_written = false;
      for (const auto result : step->results) {
        makers[result] = &*step;
        values[result].is_written_later = later.count(values[result].group) != 0;
        is_written = is_written || values[result].is_written_later;
      }
      if (is_written && step->depends_on_strides) {
        pending.insert(pending.end(), step->reads.begin(), step->reads.end());
      }
      for (const auto value : step->written) {
        later.insert(values[value].group);
      }
    }
    std::set<const Step*> known;
    while (!pending.empty()) {
      const auto value = pending.back();
      pending.pop_back();
      values[value].has_fixed_strides = true;
      const auto* maker = makers[value];
      if (maker != nullptr && known.insert(maker).second) {
        pending.insert(pending.end(), maker->reads.begin(), maker->reads.end());
      }
    }
  }

  std::vector<Value> parents_ = {kUnknown, kRandomState};
  std::vector<Step> steps_;
  std::set<Value> single_pixels_;  // [batch, channels, 1, 1]
  std::map<const Graph*, Scope> scopes_;
};

}  // namespace

ValueMemory GraphMemory::of(const std::string& name) const {
  const auto found = values.find(name);
  return found == values.end() ? ValueMemory{.is_written_later = true, .has_fixed_strides = true}
                               : found->second;
}

std::map<const Graph*, GraphMemory> memory_of(const Graph& graph,
                                              const std::set<std::string>& state) {
  return MemoryAnalysis().run(graph, state);
}

}  // namespace ddp::detail
