// SPDX-License-Identifier: Apache-2.0
#include "export/training_mode.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "export/buffer_aliases.hpp"
#include "export/graph_operands.hpp"
#include "export/graph_plan.hpp"

namespace ddp::detail {
namespace {

constexpr std::array<std::string_view, 3> kModeArguments = {"train", "training", "use_input_stats"};
constexpr std::array<std::string_view, 4> kEvaluating = {"no_training", "_batch_norm_no_update",
                                                         "_transformer_encoder_layer_fwd",
                                                         "_native_multi_head_attention"};
constexpr std::string_view kDropout = "dropout_p";  // of attention
constexpr std::string_view kCounter = "num_batches_tracked", kMean = "running_mean";
constexpr std::string_view kBatchNorm = "torch.ops.aten.batch_norm.default";
constexpr const char* kFix =
    "; fix: export both modes into one archive (libddp's tools/export_model.py does)";

using Replacements = std::map<std::string, std::string>;  // names of values by removed ones

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

struct Mode {
  std::string argument;
  bool is_training;
};

// The input that says whether the node trains. An export leaves out an input that has its default.
// A normalization without running estimates uses the batch's in both modes: it has no mode.
std::optional<Mode> mode_of(const Node& node) {
  const bool is_norm = node.target.find("batch_norm") != std::string::npos ||
                       node.target.find("instance_norm") != std::string::npos;
  if (is_norm && !has_value(node, kMean)) {
    return std::nullopt;
  }
  for (const auto& input : node.inputs) {
    const auto* constant = input.value.constant();
    if (constant != nullptr && constant->isBool() && is_mode(input.name)) {
      return Mode{input.name, constant->toBool()};
    }
  }
  for (const auto& argument : schema_arguments(node)) {
    const auto& value = argument.default_value();
    if (is_mode(argument.name()) && node.input(argument.name()) == nullptr && value &&
        value->isBool()) {
      return Mode{argument.name(), value->toBool()};
    }
  }
  return std::nullopt;
}

void set_mode(Node& node, const Mode& mode, bool training) {
  const auto input =
      std::find_if(node.inputs.begin(), node.inputs.end(),
                   [&](const NamedArgument& given) { return given.name == mode.argument; });
  if (input != node.inputs.end()) {
    input->value.value = c10::IValue(training);
  } else {
    node.inputs.push_back({mode.argument, {c10::IValue(training)}});
  }
}

// Operators of a mode's own.
bool only_evaluates(const Node& node) {
  return std::any_of(kEvaluating.begin(), kEvaluating.end(), [&](std::string_view name) {
    return node.target.find(name) != std::string::npos;
  });
}
bool only_trains(const Node& node) {
  return node.target.find("_batch_norm_with_update") != std::string::npos;
}

struct ModeCounts {
  int training = 0;
  int evaluating = 0;
};

void count_modes(const Graph& graph, ModeCounts& counts) {
  for (const auto& node : graph.nodes) {
    const auto mode = mode_of(node);
    counts.training += (mode && mode->is_training) || only_trains(node);
    counts.evaluating += (mode && !mode->is_training) || only_evaluates(node);
    for (const auto& input : node.inputs) {
      if (const auto* inner = input.value.graph()) {
        count_modes(**inner, counts);
      }
    }
  }
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

  // `buffers` are those that the graph's inputs are. Returns them with all values that may share
  // their memory. Counters of a graph in a graph go to the outermost, which alone has the buffers
  // that it counts in.
  BufferNames change(Graph& graph, BufferNames buffers, Counters* outer) {
    std::vector<Node> nodes;
    Replacements replaced;
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
      if (has_graph(node)) {
        change_graphs_in(node, buffers, outer ? *outer : counters);
      }
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
    return buffers;
  }

  static void replace_name(Argument& argument, const Replacements& replaced) {
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

  static void replace_names(Node& node, const Replacements& replaced) {
    for (auto& input : node.inputs) {
      replace_name(input.value, replaced);
    }
  }

  // BatchNorm's own add_(1), beside whose buffer there are running estimates.
  bool counts_batches(const Node& node, const BufferNames& buffers) const {
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
  std::optional<Node> counter_for(const Node& node, const BufferNames& buffers) {
    const auto mode = node.target == kBatchNorm ? mode_of(node) : std::nullopt;
    if (!mode || mode->is_training) {
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

  void change_graphs_in(Node& node, BufferNames& buffers, Counters& counters) {
    const auto outside = buffers;
    const auto operands = graph_operands(node);
    for (auto& input : node.inputs) {
      if (const auto* inner = input.value.graph()) {
        auto copy = std::make_shared<Graph>(**inner);
        const auto inside = change(*copy, known_inside(operands, **inner, outside), &counters);
        add_aliases_of_graph(node, *copy, inside, buffers);
        input.value.value = std::shared_ptr<const Graph>(std::move(copy));
      }
    }
  }

  void change_node(Node& node, BufferNames& buffers) const {
    const auto mode = mode_of(node);
    if (training_) {
      refuse_unknown_training(node, mode);
    } else {
      refuse_unknown_evaluation(node, mode, buffers);
    }
    add_aliases(node, buffers);
    if (mode) {
      set_mode(node, *mode, training_);
    }
    for (auto& input : node.inputs) {
      if (input.name == kDropout && !training_) {
        input.value.value = c10::IValue(0.0);
      }
    }
  }

  static void refuse_unknown_training(const Node& node, const std::optional<Mode>& mode) {
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
    if (only_evaluates(node)) {
      refuse(node, "only evaluates");
    }
  }

  static void refuse_unknown_evaluation(const Node& node, const std::optional<Mode>& mode,
                                        const BufferNames& buffers) {
    if (draws_numbers_in_both_modes(node)) {
      refuse(node, "draws random numbers, and eval() may have to leave it out");
    }
    const auto buffer = mode ? "" : written_buffer(node, buffers);
    if (!buffer.empty()) {
      refuse(node,
             "changes the buffer " + printable(buffer) + ", and eval() may have to leave it out");
    }
  }

  bool training_;
  BufferNames buffers_;                        // of the inputs
  std::map<std::string, std::string> values_;  // of inputs, by Python's names of the buffers
};

}  // namespace

bool is_training_graph(const Graph& graph, bool otherwise) {
  ModeCounts counts;
  count_modes(graph, counts);
  return counts.training > 0 || (counts.evaluating == 0 && otherwise);
}

ExportedProgram with_mode(ExportedProgram program, bool training) {
  const bool updates_buffers = std::any_of(
      program.outputs.begin(), program.outputs.end(),
      [](const OutputSpec& output) { return output.kind == OutputKind::BufferMutation; });
  if (updates_buffers) {
    throw SettingsError(
        concat("the archive's graph updates its buffers itself, so its mode cannot change", kFix));
  }
  ModeCounts counts;
  count_modes(program.graph, counts);
  ModeChange(program, training).change(program.graph);  // its messages name a node
  if (training && counts.training + counts.evaluating == 0) {
    throw SettingsError(
        concat("the archive has only the evaluation, in which no operator has a mode", kFix));
  }
  return program;
}

}  // namespace ddp::detail
