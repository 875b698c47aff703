// SPDX-License-Identifier: Apache-2.0
#include "export/adapters.hpp"

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "ddp/core/error.hpp"
#include "export/graph_operands.hpp"

namespace ddp::detail {
namespace {

constexpr std::string_view kLinear = "torch.ops.aten.linear.default";
constexpr std::string_view kWeight = ".weight";

/// A weight's index by the name of its value in a graph.
using WeightsByValue = std::map<std::string, std::size_t>;

const std::size_t* find_weight(const WeightsByValue& weights, const Argument* argument) {
  const auto* name = argument ? argument->name() : nullptr;
  const auto found = name ? weights.find(name->name) : weights.end();
  return found == weights.end() ? nullptr : &found->second;
}

const std::size_t* linear_weight(const Node& node, const WeightsByValue& weights) {
  return node.target == kLinear ? find_weight(weights, node.input("weight")) : nullptr;
}

// Only weights that each run of the graph gets: a carried value is another one in the next run.
WeightsByValue weights_inside(const GraphOperands& operands, const Graph& inner,
                              const WeightsByValue& weights) {
  return known_inside(operands, inner, weights, operands.values.size() - operands.num_shared);
}

/// Who reads the weights.
class WeightUses {
 public:
  struct Uses {
    bool is_linear = false;
    bool is_other = false;
    std::set<std::string> modules;  // whose forward called aten.linear
  };

  explicit WeightUses(std::size_t num_weights) : uses_(num_weights) {}
  const Uses& of(std::size_t weight) const { return uses_[weight]; }

  void search(const Graph& graph, const WeightsByValue& weights) {
    for (const auto& node : graph.nodes) {
      const auto* weight = linear_weight(node, weights);
      if (weight != nullptr) {
        uses_[*weight].is_linear = true;
        uses_[*weight].modules.insert(node.module);
      }
      GraphOperands passed;
      if (has_graph(node)) {
        passed = graph_operands(node);
        search_inside(node, passed, weights);
      }
      for (const auto& input : node.inputs) {
        if (weight == nullptr || input.name != "weight") {
          record_other_uses(input.value, passed, weights);
        }
      }
    }
    for (const auto& output : graph.outputs) {
      record_other_uses(output, {}, weights);
    }
  }

 private:
  void search_inside(const Node& node, const GraphOperands& operands,
                     const WeightsByValue& weights) {
    for (const auto& input : node.inputs) {
      if (const auto* inner = input.value.graph()) {
        search(**inner, weights_inside(operands, **inner, weights));
      }
    }
  }

  // The uses of shared operands are in the node's graphs.
  void record_other_uses(const Argument& argument, const GraphOperands& passed,
                         const WeightsByValue& weights) {
    const auto shared = passed.shared();
    if (std::find(shared.begin(), shared.end(), &argument) != shared.end()) {
      return;
    }
    if (const auto* weight = find_weight(weights, &argument)) {
      uses_[*weight].is_other = true;
    }
    if (const auto* list = argument.list()) {
      for (const auto& item : *list) {
        record_other_uses(item, passed, weights);
      }
    }
  }

  std::vector<Uses> uses_;
};

// "fc.weight": "fc". Empty for a parameter of another name.
std::string layer_of(const std::string& parameter) {
  return parameter.ends_with(kWeight) ? parameter.substr(0, parameter.size() - kWeight.size()) : "";
}

// Empty if no name is a layer's weight.
std::string layer_name(const std::vector<std::string>& parameters,
                       const std::set<std::string>& modules) {
  std::string first;
  for (const auto& parameter : parameters) {
    const auto layer = layer_of(parameter);
    if (!layer.empty() && modules.count(layer) != 0) {
      return layer;
    }
    first = first.empty() ? layer : first;
  }
  return first;
}

// Whether two names are of one module of Python: then the bias is one too.
bool is_one_module(const std::string& a, const std::string& b, const TensorMap& tensors) {
  const auto first = tensors.find(a + ".bias"), second = tensors.find(b + ".bias");
  return first != tensors.end() && second != tensors.end() && first->second.is_same(second->second);
}

// The modules that call a weight of several names, each with its names. Fewer than two: all calls
// are of one layer.
std::vector<std::vector<std::string>> calling_modules(const std::vector<std::string>& parameters,
                                                      const std::set<std::string>& modules,
                                                      const TensorMap& tensors) {
  std::vector<std::vector<std::string>> callers;
  for (const auto& parameter : parameters) {
    const auto layer = layer_of(parameter);
    if (layer.empty() || modules.count(layer) == 0) {
      continue;
    }
    const auto same = std::find_if(callers.begin(), callers.end(), [&](const auto& names) {
      return is_one_module(names.front(), layer, tensors);
    });
    if (same == callers.end()) {
      callers.push_back({layer});
    } else {
      same->push_back(layer);
    }
  }
  return callers;
}

/// The adapters of a program by their weights.
struct AdaptedWeights {
  WeightsByValue by_value;                         // indexes of `adapters`
  std::vector<std::vector<std::size_t>> adapters;  // of each weight

  // nullptr if no adapter is on the node.
  const std::size_t* adapter_of(const Node& node, const WeightsByValue& weights,
                                const std::vector<ProgramAdapter>& all) const {
    const auto* weight = linear_weight(node, weights);
    if (weight == nullptr) {
      return nullptr;
    }
    const auto& candidates = adapters[*weight];
    const auto found = std::find_if(candidates.begin(), candidates.end(), [&](std::size_t i) {
      return all[i].linear.is_called_by(node.module);
    });
    return found == candidates.end() ? nullptr : &*found;
  }
};

AdaptedWeights adapted_weights(const ExportedProgram& program,
                               const std::vector<ProgramAdapter>& adapters) {
  AdaptedWeights weights;
  for (std::size_t i = 0; i < program.inputs.size(); ++i) {
    const auto* value = program.graph.inputs[i].name();
    std::vector<std::size_t> on_weight;
    for (std::size_t k = 0; k < adapters.size(); ++k) {
      if (adapters[k].linear.weights.count(program.inputs[i].target) != 0) {
        on_weight.push_back(k);
      }
    }
    if (value != nullptr && program.inputs[i].kind == InputKind::Parameter && !on_weight.empty()) {
      weights.by_value.emplace(value->name, weights.adapters.size());
      weights.adapters.push_back(std::move(on_weight));
    }
  }
  return weights;
}

/// Adds the nodes of adapters to graphs.
class BranchInsertion {
 public:
  BranchInsertion(const std::vector<ProgramAdapter>& adapters, const AdaptedWeights& weights,
                  bool training)
      : adapters_(adapters), weights_(weights), training_(training) {}

  void insert(Graph& graph) const { insert(graph, weights_.by_value); }

 private:
  // Returns the adapters that the graph or a graph in it calls. Their parameters must become inputs
  // of the graph.
  std::set<std::size_t> insert(Graph& graph, const WeightsByValue& weights) const {
    std::set<std::size_t> used;
    std::vector<Node> nodes;
    for (auto& node : graph.nodes) {
      if (has_graph(node)) {
        used.merge(insert_inside(node, weights));
      }
      const auto* adapter = weights_.adapter_of(node, weights, adapters_);
      const bool has_result = node.outputs.size() == 1 && node.outputs[0].name() != nullptr;
      if (adapter != nullptr && has_result) {
        used.insert(*adapter);
        add_branch(std::move(node), adapters_[*adapter], nodes);
      } else {
        nodes.push_back(std::move(node));
      }
    }
    graph.nodes = std::move(nodes);
    return used;
  }

  // All graphs of a node take the same operands.
  std::set<std::size_t> insert_inside(Node& node, const WeightsByValue& weights) const {
    std::set<std::size_t> used;
    std::vector<std::pair<Argument*, std::shared_ptr<Graph>>> copies;
    const auto operands = graph_operands(node);
    for (auto& input : node.inputs) {
      if (const auto* inner = input.value.graph()) {
        auto copy = std::make_shared<Graph>(**inner);
        used.merge(insert(*copy, weights_inside(operands, **inner, weights)));
        copies.emplace_back(&input.value, std::move(copy));
      }
    }
    if (used.empty()) {
      return used;
    }
    for (auto& [argument, copy] : copies) {
      for (const auto& name : parameter_names(used)) {
        copy->inputs.push_back({ValueName{name}});
      }
      argument->value = std::shared_ptr<const Graph>(std::move(copy));
    }
    for (const auto& name : parameter_names(used)) {
      if (auto* list = std::get_if<Argument::List>(&node.inputs.back().value.value)) {
        list->push_back({ValueName{name}});
      } else {
        node.inputs.push_back({"", {ValueName{name}}});
      }
    }
    return used;
  }

  std::vector<std::string> parameter_names(const std::set<std::size_t>& used) const {
    std::vector<std::string> names;
    for (const auto adapter : used) {
      names.push_back(lora_a_name(adapters_[adapter].linear.layer));
      names.push_back(lora_b_name(adapters_[adapter].linear.layer));
    }
    return names;
  }

  // x and its dropped copy may have another dtype than A and B: as in ops::lora_linear(), the
  // branch computes in the dtype of x. aten.to.other names no dtype, so the module can still change
  // its own.
  void add_branch(Node node, const ProgramAdapter& adapter, std::vector<Node>& nodes) const {
    const Argument x = *node.input("input");
    const auto result = node.outputs[0].name()->name;
    const auto value = [&](const char* part) { return Argument{ValueName{result + part}}; };
    const auto call = [&](std::string_view target, std::vector<NamedArgument> inputs,
                          Argument output) {
      Node added;
      added.name = output.name()->name;
      added.target = target;
      added.inputs = std::move(inputs);
      added.outputs = {std::move(output)};
      added.python_line = node.python_line;
      added.module = node.module;
      nodes.push_back(std::move(added));
    };
    const auto cast = [&](const std::string& parameter, const char* part) {
      call("torch.ops.aten.to.other", {{"self", {ValueName{parameter}}}, {"other", x}},
           value(part));
    };
    const auto linear = [&](Argument input, const char* weight, const char* part) {
      call(kLinear, {{"input", std::move(input)}, {"weight", value(weight)}}, value(part));
    };
    node.outputs[0] = value(".base");
    nodes.push_back(node);
    const bool drops = adapter.dropout > 0;
    if (drops) {
      call("torch.ops.aten.dropout.default",
           {{"input", x},
            {"p", {c10::IValue(adapter.dropout)}},
            {"train", {c10::IValue(training_)}}},
           value(".dropped"));
    }
    cast(lora_a_name(adapter.linear.layer), ".lora_A");
    cast(lora_b_name(adapter.linear.layer), ".lora_B");
    linear(drops ? value(".dropped") : x, ".lora_A", ".low_rank");
    linear(value(".low_rank"), ".lora_B", ".branch");
    call("torch.ops.aten.add.Tensor",
         {{"self", value(".base")},
          {"other", value(".branch")},
          {"alpha", {c10::IValue(adapter.scale)}}},
         {ValueName{result}});
  }

  const std::vector<ProgramAdapter>& adapters_;
  const AdaptedWeights& weights_;
  bool training_;
};

// Position behind the weight's input. Empty if the program does not have the weight.
std::optional<std::size_t> place_of(const ProgramLinear& linear, const ExportedProgram& program) {
  std::optional<std::size_t> place;
  for (std::size_t i = 0; i < program.inputs.size(); ++i) {
    const auto& input = program.inputs[i];
    if (input.kind != InputKind::Parameter || linear.weights.count(input.target) == 0) {
      continue;
    }
    if (layer_of(input.target) == linear.layer) {
      return i + 1;
    }
    place = place ? place : i + 1;
  }
  return place;
}

void add_inputs(ExportedProgram& program, const std::vector<ProgramAdapter>& adapters) {
  for (const auto& adapter : adapters) {
    const auto& linear = adapter.linear;
    const auto place = place_of(linear, program);
    for (const auto& name : {lora_b_name(linear.layer), lora_a_name(linear.layer)}) {
      if (place) {
        const auto offset = static_cast<std::ptrdiff_t>(*place);
        program.graph.inputs.insert(program.graph.inputs.begin() + offset, {ValueName{name}});
        program.inputs.insert(program.inputs.begin() + offset,
                              {InputKind::Parameter, name, true, {}});
      }
    }
  }
}

}  // namespace

std::string lora_a_name(const std::string& layer) {
  return layer + ".lora_A.weight";
}

std::string lora_b_name(const std::string& layer) {
  return layer + ".lora_B.weight";
}

std::vector<ProgramLinear> find_linears(const ExportedProgram& program, const TensorMap& tensors) {
  std::map<const at::TensorImpl*, std::size_t> weights;
  std::vector<std::vector<std::string>> names;  // of each weight
  std::set<std::string> inputs;
  WeightsByValue by_value;
  for (std::size_t i = 0; i < program.inputs.size(); ++i) {
    const auto& input = program.inputs[i];
    const auto* value = program.graph.inputs[i].name();
    if (input.kind != InputKind::Parameter || tensors.at(input.target).dim() != 2) {
      continue;
    }
    const auto* tensor = tensors.at(input.target).unsafeGetTensorImpl();
    const auto weight = weights.emplace(tensor, names.size()).first->second;
    names.resize(std::max(names.size(), weight + 1));
    names[weight].push_back(input.target);
    inputs.insert(input.target);
    if (value != nullptr) {
      by_value.emplace(value->name, weight);
    }
  }
  for (const auto& [name, tensor] : tensors) {  // names that are no inputs
    const auto weight = weights.find(tensor.unsafeGetTensorImpl());
    if (weight != weights.end() && inputs.count(name) == 0) {
      names[weight->second].push_back(name);
    }
  }
  WeightUses uses(names.size());
  uses.search(program.graph, by_value);
  std::vector<ProgramLinear> linears;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::set<std::string> of_weight(names[i].begin(), names[i].end());
    const auto callers = calling_modules(names[i], uses.of(i).modules, tensors);
    if (callers.size() > 1) {
      for (const auto& caller : callers) {
        linears.push_back({.layer = caller.front(),
                           .weights = of_weight,
                           .callers = {caller.begin(), caller.end()},
                           .has_other_uses = true});
      }
      continue;
    }
    const auto layer = layer_name(names[i], uses.of(i).modules);
    if (uses.of(i).is_linear && !layer.empty()) {
      linears.push_back({.layer = layer,
                         .weights = of_weight,
                         .callers = {},
                         .has_other_uses = uses.of(i).is_other});
    }
  }
  return linears;
}

void check_adapter(const ops::LinearLayer& adapted, const std::vector<ops::LinearLayer>& linears,
                   const TensorMap& tensors) {
  const auto& name = adapted.name;
  const auto &a = adapted.lora_a, &b = adapted.lora_b;
  const auto found = std::find_if(linears.begin(), linears.end(),
                                  [&](const auto& linear) { return linear.name == name; });
  if (found == linears.end()) {
    throw SettingsError(concat(printable(name), " is no linear layer of the program"));
  }
  if (tensors.count(lora_a_name(name)) + tensors.count(lora_b_name(name)) != 0) {
    throw SettingsError(concat("the layer ", printable(name), " already has an adapter"));
  }
  const auto& weight = found->weight;
  if (a.dim() != 2 || b.dim() != 2 || a.size(0) == 0 || b.size(1) != a.size(0) ||
      a.size(1) != weight.size(1) || b.size(0) != weight.size(0)) {
    throw SettingsError(concat("an adapter of ", a.sizes(), " and ", b.sizes(),
                               " does not fit the layer ", printable(name), " of ",
                               weight.sizes()));
  }
}

void add_adapters(ExportedProgram& program, const std::vector<ProgramAdapter>& adapters,
                  bool training) {
  const auto weights = adapted_weights(program, adapters);
  WeightUses uses(weights.adapters.size());
  uses.search(program.graph, weights.by_value);
  for (std::size_t i = 0; i < weights.adapters.size(); ++i) {
    const auto& modules = uses.of(i).modules;
    for (const auto k : weights.adapters[i]) {
      const auto& linear = adapters[k].linear;
      const bool is_called =
          std::any_of(modules.begin(), modules.end(),
                      [&](const std::string& module) { return linear.is_called_by(module); });
      if (!is_called && (uses.of(i).is_linear || uses.of(i).is_other)) {
        throw SettingsError(concat("the layer ", printable(linear.layer),
                                   " is no aten.linear in the program of ",
                                   training ? "training" : "evaluation",
                                   ", so its adapter would have no effect there; fix: export both "
                                   "modes without run_decompositions()"));
      }
    }
  }
  BranchInsertion(adapters, weights, training).insert(program.graph);
  add_inputs(program, adapters);
}

}  // namespace ddp::detail
