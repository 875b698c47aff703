// SPDX-License-Identifier: Apache-2.0
#include "export/training_mode.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "ddp/core/error.hpp"
#include "export/graph_plan.hpp"

namespace ddp::detail {
namespace {

constexpr std::array<std::string_view, 3> kModeArguments = {"train", "training", "use_input_stats"};
constexpr std::string_view kDropout = "dropout_p";  // of attention
constexpr std::string_view kCounter = "num_batches_tracked", kMean = "running_mean";
constexpr const char* kFix =
    "; fix: export both modes into one archive (libddp's tools/export_model.py does)";

bool is_mode(std::string_view argument) {
  return std::find(kModeArguments.begin(), kModeArguments.end(), argument) != kModeArguments.end();
}

// The argument that says whether the node trains; nullptr for an operator without a mode.
NamedArgument* mode_argument(Node& node) {
  for (auto& input : node.inputs) {
    const auto* constant = input.value.constant();
    if (constant != nullptr && constant->isBool() && is_mode(input.name)) {
      return &input;
    }
  }
  return nullptr;
}

bool has_input(const Node& node, std::string_view name) {
  const auto* input = node.input(name);
  return input != nullptr && input->name() != nullptr;
}

// Instance normalization without running statistics uses the input's in both modes.
bool has_mode(const Node& node) {
  return !node.target.starts_with("torch.ops.aten.instance_norm") || has_input(node, kMean);
}

using BufferNames = std::map<std::string, std::string>;  // Python's names by the values' names

BufferNames buffer_names(const ExportedProgram& program) {
  BufferNames names;
  for (std::size_t i = 0; i < program.inputs.size(); ++i) {
    const auto* name = program.graph.inputs[i].name();
    if (program.inputs[i].kind == InputKind::Buffer && name != nullptr) {
      names.emplace(name->name, program.inputs[i].target);
    }
  }
  return names;
}

bool counts_batches(const Node& node, const BufferNames& buffers) {
  const auto* self = node.target == "torch.ops.aten.add_.Tensor" ? node.input("self") : nullptr;
  const auto found = self && self->name() ? buffers.find(self->name()->name) : buffers.end();
  return found != buffers.end() && found->second.ends_with(kCounter);
}

// The node that Python's BatchNorm has in training before its normalization, if it has the buffer.
std::optional<Node> counter_for(const Node& node, const BufferNames& buffers) {
  const auto* mean = node.input(kMean);
  const auto found = mean && mean->name() ? buffers.find(mean->name()->name) : buffers.end();
  if (found == buffers.end() || !found->second.ends_with(kMean)) {
    return std::nullopt;
  }
  const auto wanted = found->second.substr(0, found->second.size() - kMean.size()).append(kCounter);
  for (const auto& [name, buffer] : buffers) {
    if (buffer == wanted) {
      Node counter;
      counter.name = node.name + "_counter";
      counter.target = "torch.ops.aten.add_.Tensor";
      counter.inputs = {{"self", {ValueName{name}}}, {"other", {c10::IValue(int64_t{1})}}};
      counter.python_line = node.python_line;
      return counter;
    }
  }
  return std::nullopt;
}

// An operator that has a mode, or the probability of a dropout, draws numbers in training only.
bool draws_numbers_in_both_modes(const Node& node) {
  const auto name = operator_name(node.target);
  const auto found = name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
  if (!found || !found->hasTag(at::Tag::nondeterministic_seeded)) {
    return false;
  }
  const auto& arguments = found->schema().arguments();
  return std::none_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
    return is_mode(argument.name()) || argument.name() == kDropout;
  });
}

void change(Node& node, bool training) {
  auto* mode = mode_argument(node);
  if (mode != nullptr && has_mode(node)) {
    mode->value.value = c10::IValue(training);
    return;
  }
  for (auto& input : node.inputs) {
    if (input.name == kDropout && !training) {
      input.value.value = c10::IValue(0.0);
    }
  }
  if (!training && draws_numbers_in_both_modes(node)) {
    throw SettingsError(node.describe() +
                        " draws random numbers, and eval() may have to leave it out" + kFix);
  }
}

// The values behind a node's graphs are the inputs of these graphs.
BufferNames names_inside(const Node& node, const Graph& inner, const BufferNames& buffers) {
  std::vector<const ValueName*> operands;
  const auto add = [&](const Argument& argument) { operands.push_back(argument.name()); };
  for (const auto& input : node.inputs) {
    if (std::holds_alternative<std::shared_ptr<const Graph>>(input.value.value)) {
      operands.clear();
    } else if (const auto* list = input.value.list()) {
      std::for_each(list->begin(), list->end(), add);
    } else {
      add(input.value);
    }
  }
  BufferNames names;
  for (std::size_t i = 0; i < std::min(operands.size(), inner.inputs.size()); ++i) {
    const auto found = operands[i] ? buffers.find(operands[i]->name) : buffers.end();
    if (found != buffers.end() && inner.inputs[i].name() != nullptr) {
      names.emplace(inner.inputs[i].name()->name, found->second);
    }
  }
  return names;
}

void change(Graph& graph, bool training, const BufferNames& buffers) {
  std::vector<Node> nodes;
  for (auto& node : graph.nodes) {
    if (!training && counts_batches(node, buffers)) {
      continue;
    }
    const auto* mode = mode_argument(node);
    if (training && mode != nullptr && !mode->value.constant()->toBool()) {
      if (auto counter = counter_for(node, buffers)) {
        nodes.push_back(std::move(*counter));
      }
    }
    for (auto& input : node.inputs) {
      if (const auto* inner = std::get_if<std::shared_ptr<const Graph>>(&input.value.value)) {
        auto copy = std::make_shared<Graph>(**inner);
        change(*copy, training, names_inside(node, **inner, buffers));
        input.value.value = std::shared_ptr<const Graph>(std::move(copy));
      }
    }
    change(node, training);
    nodes.push_back(std::move(node));
  }
  graph.nodes = std::move(nodes);
}

// Operators in training mode, and operators in evaluation mode.
std::pair<int, int> count_modes(const Graph& graph) {
  std::pair<int, int> counts;
  for (auto node : graph.nodes) {
    const auto* mode = mode_argument(node);
    if (mode != nullptr && has_mode(node)) {
      ++(mode->value.constant()->toBool() ? counts.first : counts.second);
    }
    for (const auto& input : node.inputs) {
      if (const auto* inner = std::get_if<std::shared_ptr<const Graph>>(&input.value.value)) {
        const auto [training, evaluating] = count_modes(**inner);
        counts.first += training;
        counts.second += evaluating;
      }
    }
  }
  return counts;
}

}  // namespace

bool is_training_graph(const Graph& graph, bool otherwise) {
  const auto [training, evaluating] = count_modes(graph);
  return training > 0 || (evaluating == 0 && otherwise);
}

ExportedProgram in_other_mode(ExportedProgram program, bool training) {
  const bool updates_buffers = std::any_of(
      program.outputs.begin(), program.outputs.end(),
      [](const OutputSpec& output) { return output.kind == OutputKind::BufferMutation; });
  if (updates_buffers) {
    throw SettingsError(
        concat("the archive's graph updates its buffers itself, so its mode cannot change", kFix));
  }
  change(program.graph, training, buffer_names(program));
  return program;
}

}  // namespace ddp::detail
