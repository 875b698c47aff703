// SPDX-License-Identifier: Apache-2.0
#include "export/training_mode.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "export/graph_plan.hpp"

namespace ddp::detail {
namespace {

constexpr std::array<std::string_view, 3> kModeArguments = {"train", "training", "use_input_stats"};
constexpr std::string_view kDropout = "dropout_p";  // of attention
constexpr std::string_view kCounter = "num_batches_tracked", kMean = "running_mean";
constexpr std::string_view kBatchNorm = "torch.ops.aten.batch_norm.default";
constexpr const char* kFix =
    "; fix: export both modes into one archive (libddp's tools/export_model.py does)";

using Names = std::map<std::string, std::string>;

[[noreturn]] void refuse(const Node& node, const std::string& why) {
  throw SettingsError(node.describe() + ' ' + why + kFix);
}

bool is_mode(std::string_view argument) {
  return std::find(kModeArguments.begin(), kModeArguments.end(), argument) != kModeArguments.end();
}

bool has_value(const Node& node, std::string_view input) {
  const auto* argument = node.input(input);
  return argument != nullptr && argument->name() != nullptr;
}

const std::vector<c10::Argument>& schema_arguments(const Node& node) {
  static const std::vector<c10::Argument> kNone;
  const auto found = find_operator(node.target);
  return found ? found->schema().arguments() : kNone;
}

// Position of the input that says whether the node trains. A normalization without running
// estimates uses the batch's in both modes: it has no mode.
std::optional<std::size_t> mode_input(const Node& node) {
  for (std::size_t i = 0; i < node.inputs.size(); ++i) {
    const auto* constant = node.inputs[i].value.constant();
    if (constant != nullptr && constant->isBool() && is_mode(node.inputs[i].name)) {
      const bool is_norm = node.input(kMean) != nullptr;
      return is_norm && !has_value(node, kMean) ? std::nullopt : std::optional(i);
    }
  }
  return std::nullopt;
}

bool is_training(const Node& node, std::size_t mode) {
  return node.inputs[mode].value.constant()->toBool();
}

// Operators in training mode, and operators in evaluation mode.
std::pair<int, int> count_modes(const Graph& graph) {
  std::pair<int, int> counts;
  for (const auto& node : graph.nodes) {
    if (const auto mode = mode_input(node)) {
      ++(is_training(node, *mode) ? counts.first : counts.second);
    }
    for (const auto& input : node.inputs) {
      if (const auto* inner = input.value.graph()) {
        const auto [training, evaluating] = count_modes(**inner);
        counts.first += training;
        counts.second += evaluating;
      }
    }
  }
  return counts;
}

// An operator that has a mode, or a probability of dropout, draws numbers in training only.
bool draws_numbers_in_both_modes(const Node& node) {
  const auto found = find_operator(node.target);
  if (!found || !found->hasTag(at::Tag::nondeterministic_seeded)) {
    return false;
  }
  const auto& arguments = schema_arguments(node);
  return std::none_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
    return is_mode(argument.name()) || argument.name() == kDropout;
  });
}

/// Changes the mode of a program's graphs.
class ModeChange {
 public:
  ModeChange(const ExportedProgram& program, bool training) : training_(training) {
    for (std::size_t i = 0; i < program.inputs.size(); ++i) {
      const auto* name = program.graph.inputs[i].name();
      if (program.inputs[i].kind == InputKind::Buffer && name != nullptr) {
        buffers_.emplace(name->name, program.inputs[i].target);
        values_.emplace(program.inputs[i].target, name->name);
      }
    }
  }

  void change(Graph& graph) { change(graph, buffers_, nullptr); }

 private:
  using Counters = std::vector<Node>;

  // `buffers` are Python's names of the buffers by their values' names in this graph, and of values
  // that share a buffer's memory. Counters of a graph in a graph go to the outermost, which alone
  // has the buffers that it counts in.
  void change(Graph& graph, Names buffers, Counters* outer) {
    std::vector<Node> nodes;
    Names replaced;  // results of removed nodes
    for (auto& node : graph.nodes) {
      replace_names(node, replaced);
      if (!training_ && counts_batches(node, buffers)) {
        const auto self = node.input("self")->name()->name;
        for (const auto& output : node.outputs) {
          if (output.name()) {
            replaced.emplace(output.name()->name, self);
          }
        }
        continue;
      }
      Counters counters;
      change_graphs_in(node, buffers, outer ? *outer : counters);
      if (auto counter = training_ ? counter_for(node, buffers) : std::nullopt) {
        (outer ? *outer : counters).push_back(std::move(*counter));
      }
      change_node(node, buffers);
      std::move(counters.begin(), counters.end(), std::back_inserter(nodes));
      nodes.push_back(std::move(node));
    }
    graph.nodes = std::move(nodes);
    for (auto& output : graph.outputs) {
      replace_name(output, replaced);
    }
  }

  static void replace_name(Argument& argument, const Names& replaced) {
    if (const auto* name = argument.name()) {
      if (const auto found = replaced.find(name->name); found != replaced.end()) {
        argument.value = ValueName{found->second};
      }
    } else if (auto* list = std::get_if<Argument::List>(&argument.value)) {
      for (auto& item : *list) {
        replace_name(item, replaced);
      }
    }
  }

  static void replace_names(Node& node, const Names& replaced) {
    for (auto& input : node.inputs) {
      replace_name(input.value, replaced);
    }
  }

  // BatchNorm's own add_(1), beside whose buffer there are running estimates.
  bool counts_batches(const Node& node, const Names& buffers) const {
    const auto* self = node.target == "torch.ops.aten.add_.Tensor" ? node.input("self") : nullptr;
    const auto found = self && self->name() ? buffers.find(self->name()->name) : buffers.end();
    return found != buffers.end() && found->second.ends_with(kCounter) &&
           values_.count(sibling(found->second, kCounter, kMean)) != 0;
  }

  // "norm.running_mean": "norm.num_batches_tracked"
  static std::string sibling(const std::string& name, std::string_view end,
                             std::string_view other) {
    return name.substr(0, name.size() - end.size()).append(other);
  }

  // What Python's BatchNorm does in training before it normalizes.
  std::optional<Node> counter_for(const Node& node, const Names& buffers) {
    const auto mode = node.target == kBatchNorm ? mode_input(node) : std::nullopt;
    if (!mode || is_training(node, *mode)) {
      return std::nullopt;
    }
    const auto mean = buffers.find(node.input(kMean)->name()->name);
    if (mean == buffers.end() || !mean->second.ends_with(kMean)) {
      return std::nullopt;
    }
    const auto value = values_.find(sibling(mean->second, kMean, kCounter));
    if (value == values_.end()) {
      return std::nullopt;
    }
    Node counter;
    counter.name = node.name + "_counter";
    counter.target = "torch.ops.aten.add_.Tensor";
    counter.inputs = {{"self", {ValueName{value->second}}}, {"other", {c10::IValue(int64_t{1})}}};
    counter.python_line = node.python_line;
    return counter;
  }

  // The values behind a node's graphs are the inputs of these graphs.
  static Names names_inside(const Node& node, const Graph& inner, const Names& buffers) {
    std::vector<const ValueName*> operands;
    const auto add = [&](const Argument& argument) {
      const auto* constant = argument.constant();
      if (constant == nullptr || !constant->isString()) {  // the identifier of invoke_subgraph
        operands.push_back(argument.name());
      }
    };
    for (const auto& input : node.inputs) {
      if (input.value.graph() != nullptr) {
        operands.clear();
      } else if (const auto* list = input.value.list()) {
        std::for_each(list->begin(), list->end(), add);
      } else {
        add(input.value);
      }
    }
    Names names;
    for (std::size_t i = 0; i < std::min(operands.size(), inner.inputs.size()); ++i) {
      const auto found = operands[i] ? buffers.find(operands[i]->name) : buffers.end();
      if (found != buffers.end() && inner.inputs[i].name() != nullptr) {
        names.emplace(inner.inputs[i].name()->name, found->second);
      }
    }
    return names;
  }

  void change_graphs_in(Node& node, const Names& buffers, Counters& counters) {
    for (auto& input : node.inputs) {
      if (const auto* inner = input.value.graph()) {
        auto copy = std::make_shared<Graph>(**inner);
        change(*copy, names_inside(node, **inner, buffers), &counters);
        input.value.value = std::shared_ptr<const Graph>(std::move(copy));
      }
    }
  }

  void change_node(Node& node, Names& buffers) const {
    const auto mode = mode_input(node);
    if (training_) {
      refuse_unknown_training(node, mode);
    } else {
      refuse_unknown_evaluation(node, mode, buffers);
    }
    if (mode) {
      node.inputs[*mode].value.value = c10::IValue(training_);
    }
    for (auto& input : node.inputs) {
      if (input.name == kDropout && !training_) {
        input.value.value = c10::IValue(0.0);
      }
    }
  }

  static void refuse_unknown_training(const Node& node, std::optional<std::size_t> mode) {
    const auto& arguments = schema_arguments(node);
    const bool has_dropout =
        std::any_of(arguments.begin(), arguments.end(),
                    [](const auto& argument) { return argument.name() == kDropout; });
    const auto* p = node.input(kDropout) ? node.input(kDropout)->constant() : nullptr;
    if (has_dropout && (p == nullptr || p->toScalar().to<double>() == 0)) {
      refuse(node, "evaluates attention, and train() cannot know its probability of dropout");
    }
    const auto* momentum =
        mode && node.input("momentum") ? node.input("momentum")->constant() : nullptr;
    if (momentum != nullptr && momentum->isDouble() && momentum->toDouble() == 0) {
      refuse(node, "has momentum 0, and train() cannot know the share of a batch in the estimates");
    }
    if (node.target.find("no_training") != std::string::npos ||
        node.target.find("_transformer_encoder_layer_fwd") != std::string::npos ||
        node.target.find("_native_multi_head_attention") != std::string::npos) {
      refuse(node, "only evaluates");
    }
  }

  // Also follows values that share a buffer's memory.
  static void refuse_unknown_evaluation(const Node& node, std::optional<std::size_t> mode,
                                        Names& buffers) {
    if (draws_numbers_in_both_modes(node)) {
      refuse(node, "draws random numbers, and eval() may have to leave it out");
    }
    for (const auto& argument : schema_arguments(node)) {
      const auto* given = node.input(argument.name());
      const auto buffer =
          given && given->name() ? buffers.find(given->name()->name) : buffers.end();
      if (argument.alias_info() == nullptr || buffer == buffers.end()) {
        continue;
      }
      if (argument.alias_info()->isWrite() && !mode) {
        refuse(node, "changes the buffer " + printable(buffer->second) +
                         ", and eval() may have to leave it out");
      }
      const auto python_name = buffer->second;
      for (const auto& output : node.outputs) {
        if (output.name()) {
          buffers.emplace(output.name()->name, python_name);
        }
      }
    }
  }

  bool training_;
  Names buffers_;  // Python's names by the values' names
  Names values_;   // the opposite
};

}  // namespace

bool is_training_graph(const Graph& graph, bool otherwise) {
  const auto [training, evaluating] = count_modes(graph);
  return training > 0 || (evaluating == 0 && otherwise);
}

ExportedProgram with_mode(ExportedProgram program, bool training) {
  const bool updates_buffers = std::any_of(
      program.outputs.begin(), program.outputs.end(),
      [](const OutputSpec& output) { return output.kind == OutputKind::BufferMutation; });
  if (updates_buffers) {
    throw SettingsError(
        concat("the archive's graph updates its buffers itself, so its mode cannot change", kFix));
  }
  ModeChange(program, training).change(program.graph);
  return program;
}

}  // namespace ddp::detail
