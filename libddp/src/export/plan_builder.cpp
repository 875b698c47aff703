// SPDX-License-Identifier: Apache-2.0
#include "export/plan_builder.hpp"

#include <ATen/Context.h>

#include <algorithm>
#include <string_view>

#include "core/log/error_text.hpp"
#include "ddp/core/error.hpp"
#include "export/stack_functions.hpp"

namespace ddp::detail {
namespace {

constexpr std::string_view kHigherOrder = "torch.ops.higher_order.";
// A file of weights must not read or write other files.
constexpr std::string_view kRefused[] = {"aten::from_file", "aten::save"};

c10::IValue device_of(const CallContext& context) {
  return context.device;
}

// The export records whether cuDNN may be used, which depends on the machine that it ran on.
c10::IValue cudnn_enabled(const CallContext&) {
  return at::globalContext().userEnabledCuDNN();
}

c10::OperatorHandle allowed_operator(const Node& node, const c10::OperatorName& name) {
  if (std::find(std::begin(kRefused), std::end(kRefused), name.name) != std::end(kRefused)) {
    throw DataError("libddp does not run this operator of an archive");
  }
  const auto found = find_operator(node.target);
  if (!found) {
    throw DataError(concat("LibTorch has no operator ", printable(c10::toString(name)),
                           "; fix: name the shared library that registers it in "
                           "ExportedModuleOptions::libraries (in exported_ddp model.libraries), or "
                           "export without it (ExportedProgram.run_decompositions, which leaves "
                           "torch.no_grad and detach() out)"));
  }
  return *found;
}

c10::TypePtr without_optional(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::OptionalType
             ? without_optional(type->expectRef<c10::OptionalType>().getElementType())
             : type;
}

// A list of symbolic integers holds plain ones here.
c10::TypePtr element_type(const c10::TypePtr& list) {
  const auto type = list->expectRef<c10::ListType>().getElementType();
  return type->kind() == c10::TypeKind::SymIntType ? c10::IntType::get() : type;
}

}  // namespace

void PlanBuilder::build(const Graph& graph) {
  for (std::size_t i = 0; i < graph.inputs.size(); ++i) {
    const auto* name = graph.inputs[i].name();
    plan_.input_slots_.push_back(name ? define(name->name) : plan_.num_slots_++);
  }
  for (const auto& node : graph.nodes) {
    try {
      plan_.steps_.push_back(step_of(node));
    } catch (const std::exception& error) {
      const std::string why = message_of(error);
      throw DataError(why.starts_with("node ") ? why : concat(node.describe(), ": ", why));
    }
  }
  for (const auto& output : graph.outputs) {
    plan_.outputs_.push_back(operand(output, nullptr));
  }
  find_last_uses();
}

PlanBuilder::Step PlanBuilder::step_of(const Node& node) {
  Step step;
  step.description = node.describe();
  if (node.fused != nullptr) {
    step.function = [fused = node.fused](ValueStack& stack, const CallContext&) { fused(stack); };
    step.arguments = plain_arguments(node);
  } else if (node.target.starts_with(kHigherOrder)) {
    step.function = higher_order_function(node);
    step.arguments = plain_arguments(node);
  } else if (const auto name = operator_name(node.target)) {
    add_operator(node, allowed_operator(node, *name), step);
  } else {
    step.function = number_function(node.target);
    if (!step.function) {
      throw DataError("libddp does not know this target");
    }
    step.arguments = plain_arguments(node);
  }
  add_outputs(node, step);
  return step;
}

void PlanBuilder::add_operator(const Node& node, const c10::OperatorHandle& handle, Step& step) {
  step.function = [handle, name = c10::toString(handle.operator_name())](
                      ValueStack& stack, const CallContext& context) {
    const auto* overrides = context.overrides.get();
    const auto found = overrides ? overrides->find(name) : OperatorOverrides::const_iterator();
    if (overrides && found != overrides->end()) {
      found->second(stack, context.is_training);
    } else {
      handle.callBoxed(&stack);
    }
  };
  step.arguments = operator_arguments(node, handle.schema());
  const bool is_list = node.outputs.size() == 1 && node.outputs[0].list() != nullptr;
  const auto num_returns = handle.schema().returns().size();
  if (node.outputs.size() > num_returns ||
      (is_list && handle.schema().returns()[0].type()->kind() != c10::TypeKind::ListType)) {
    throw DataError(concat("it names ", node.outputs.size(), " results of ", num_returns));
  }
}

std::vector<PlanBuilder::Operand> PlanBuilder::operator_arguments(
    const Node& node, const c10::FunctionSchema& schema) {
  std::vector<Operand> operands;
  std::size_t used = 0;
  for (const auto& parameter : schema.arguments()) {
    if (const auto* given = node.input(parameter.name())) {
      const auto type = without_optional(parameter.type());
      const auto* constant = given->constant();
      if (parameter.name() == "cudnn_enabled") {
        operands.push_back({.kind = Operand::Kind::Setting, .setting = cudnn_enabled});
      } else if (type->kind() == c10::TypeKind::ListType && constant && is_number(*constant)) {
        const auto repeats = static_cast<std::size_t>(parameter.N().value_or(1));
        operands.push_back(operand({Argument::List(repeats, *given)}, type));
      } else {
        operands.push_back(operand(*given, type));
      }
      ++used;
    } else if (parameter.default_value()) {
      operands.push_back({.constant = *parameter.default_value()});
    } else {
      throw DataError("it lacks the argument " + parameter.name());
    }
  }
  if (used != node.inputs.size()) {
    throw DataError(
        concat("its operator takes ", used, " of its ", node.inputs.size(), " arguments"));
  }
  return operands;
}

std::vector<PlanBuilder::Operand> PlanBuilder::plain_arguments(const Node& node) {
  std::vector<Operand> operands;
  for (const auto& input : node.inputs) {
    if (input.value.graph() == nullptr) {
      operands.push_back(operand(input.value, nullptr));
    }
  }
  return operands;
}

PlanBuilder::Operand PlanBuilder::operand(const Argument& argument, const c10::TypePtr& type) {
  if (const auto* name = argument.name()) {
    return {.kind = Operand::Kind::Slot, .slot = slot(name->name), .type = type};
  }
  if (const auto* list = argument.list()) {
    return list_operand(*list, type);
  }
  if (const auto* dtype = argument.dtype()) {
    return {.constant = *dtype};
  }
  const auto* constant = argument.constant();
  if (constant == nullptr) {
    throw DataError("a graph stands where a value is expected");
  }
  if (constant->isDevice()) {
    return {.kind = Operand::Kind::Setting, .setting = device_of};
  }
  return {.constant = converted(*constant, type)};
}

PlanBuilder::Operand PlanBuilder::list_operand(const Argument::List& list,
                                               const c10::TypePtr& type) {
  Operand result{.kind = Operand::Kind::List};
  if (type != nullptr && type->kind() != c10::TypeKind::ListType) {
    throw DataError("a list stands where the operator takes a " + type->str());
  }
  result.type = type == nullptr ? c10::TypePtr(c10::AnyType::get()) : element_type(type);
  const auto inner = type == nullptr ? nullptr : without_optional(result.type);
  for (const auto& item : list) {
    result.elements.push_back(operand(item, inner));
  }
  return result;
}

std::size_t PlanBuilder::define(const std::string& name) {
  if (!slots_.emplace(name, plan_.num_slots_).second) {
    throw DataError("the value " + printable(name.substr(0, 80)) + " is made twice");
  }
  return plan_.num_slots_++;
}

std::size_t PlanBuilder::slot(const std::string& name) const {
  const auto found = slots_.find(name);
  if (found == slots_.end()) {
    throw DataError("no earlier node makes the value " + printable(name.substr(0, 80)));
  }
  return found->second;
}

void PlanBuilder::add_outputs(const Node& node, Step& step) {
  for (const auto& output : node.outputs) {
    auto& [is_list, slots] = step.results.emplace_back();
    is_list = output.list() != nullptr;
    if (const auto* name = output.name()) {
      slots.push_back(define(name->name));
    } else if (const auto* list = output.list()) {
      for (const auto& item : *list) {
        const auto* item_name = item.name();
        slots.push_back(item_name ? define(item_name->name) : plan_.num_slots_++);
      }
    }
  }
}

// Goes backwards: the first step that mentions a slot is its last use. A result that nobody reads
// is freed behind the step that makes it.
void PlanBuilder::find_last_uses() {
  std::vector<bool> is_used(plan_.num_slots_, false);
  std::vector<std::size_t> mentioned;
  const auto mention = [&](const auto& self, const Operand& operand) -> void {
    if (operand.kind == Operand::Kind::Slot) {
      mentioned.push_back(operand.slot);
    }
    for (const auto& element : operand.elements) {
      self(self, element);
    }
  };
  for (const auto& output : plan_.outputs_) {
    mention(mention, output);
  }
  for (const auto slot : mentioned) {
    is_used[slot] = true;
  }
  for (auto step = plan_.steps_.rbegin(); step != plan_.steps_.rend(); ++step) {
    mentioned.clear();
    for (const auto& argument : step->arguments) {
      mention(mention, argument);
    }
    for (const auto& result : step->results) {
      mentioned.insert(mentioned.end(), result.slots.begin(), result.slots.end());
    }
    for (const auto slot : mentioned) {
      if (!is_used[slot]) {
        step->last_uses.push_back(slot);
        is_used[slot] = true;
      }
    }
  }
  for (const auto slot : plan_.input_slots_) {
    if (!is_used[slot]) {
      plan_.unused_inputs_.push_back(slot);
    }
  }
}

}  // namespace ddp::detail
