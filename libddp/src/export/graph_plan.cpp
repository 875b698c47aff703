// SPDX-License-Identifier: Apache-2.0
#include "export/graph_plan.hpp"

#include <ATen/ScalarOps.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "ddp/core/error.hpp"
#include "export/plan_builder.hpp"

namespace ddp::detail {

std::optional<c10::OperatorName> operator_name(const std::string& target) {
  constexpr std::string_view kOperators = "torch.ops.";
  if (!target.starts_with(kOperators)) {
    return std::nullopt;
  }
  const auto name = target.substr(kOperators.size());
  const auto dot = name.find('.');
  const auto second = dot == std::string::npos ? dot : name.find('.', dot + 1);
  if (second == std::string::npos) {
    return std::nullopt;
  }
  const auto overload = name.substr(second + 1);
  return c10::OperatorName(name.substr(0, dot) + "::" + name.substr(dot + 1, second - dot - 1),
                           overload == "default" ? "" : overload);
}

std::optional<c10::OperatorHandle> find_operator(const std::string& target) {
  const auto name = operator_name(target);
  return name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
}

bool has_operator(const Graph& graph, const std::string& name) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [&](const Node& node) {
    const auto called = operator_name(node.target);
    return (called && c10::toString(*called) == name) ||
           std::any_of(node.inputs.begin(), node.inputs.end(), [&](const NamedArgument& input) {
             const auto* inner = input.value.graph();
             return inner != nullptr && has_operator(**inner, name);
           });
  });
}

bool is_number(const c10::IValue& value) {
  return value.isInt() || value.isDouble() || value.isBool() || value.isComplexDouble();
}

c10::IValue converted(const c10::IValue& value, const c10::TypePtr& type) {
  if (type == nullptr) {
    return value;
  }
  if (type->kind() == c10::TypeKind::TensorType && is_number(value)) {
    auto tensor = at::scalar_to_tensor(value.toScalar());
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    return tensor;
  }
  if (type->kind() == c10::TypeKind::FloatType && value.isInt()) {
    return static_cast<double>(value.toInt());
  }
  return value;
}

c10::IValue GraphPlan::value_of(const Operand& operand, const Frame& frame,
                                const CallContext& context) {
  switch (operand.kind) {
    case Operand::Kind::Constant:
      return operand.constant;
    case Operand::Kind::Slot:
      return converted(frame[operand.slot], operand.type);
    case Operand::Kind::Setting:
      return operand.setting(context);
    case Operand::Kind::List:
      break;
  }
  c10::impl::GenericList list(operand.type);
  list.reserve(operand.elements.size());
  for (const auto& element : operand.elements) {
    list.push_back(value_of(element, frame, context));
  }
  return list;
}

void GraphPlan::store(const Step& step, ValueStack& values, Frame& frame) {
  if (values.size() < step.results.size()) {
    throw SettingsError(concat(step.description, " made ", values.size(), " values, and ",
                               step.results.size(), " at the export"));
  }
  for (std::size_t i = 0; i < step.results.size(); ++i) {
    const auto& [is_list, slots] = step.results[i];
    if (!is_list) {
      if (!slots.empty()) {
        frame[slots[0]] = std::move(values[i]);
      }
      continue;
    }
    const auto elements = values[i].toListRef();
    if (elements.size() != slots.size()) {
      throw SettingsError(concat(step.description, " made ", elements.size(), " values, and ",
                                 slots.size(), " at the export"));
    }
    for (std::size_t k = 0; k < elements.size(); ++k) {
      frame[slots[k]] = elements[k];
    }
  }
}

void GraphPlan::run_step(const Step& step, Frame& frame, ValueStack& stack,
                         const CallContext& context) const {
  stack.clear();
  for (const auto& argument : step.arguments) {
    stack.push_back(value_of(argument, frame, context));
  }
  try {
    step.function(stack, context);
  } catch (c10::Error& error) {
    error.add_context(step.description);
    throw;
  } catch (const DataError& error) {
    throw SettingsError(step.description + ": " + error.what());  // the sizes do not fit
  }
  store(step, stack, frame);
  stack.clear();
  for (const auto slot : step.last_uses) {
    frame[slot] = c10::IValue();
  }
}

ValueStack GraphPlan::run(ValueStack inputs, const CallContext& context) const {
  Frame frame(num_slots_);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    frame[input_slots_[i]] = std::move(inputs[i]);
  }
  for (const auto slot : unused_inputs_) {
    frame[slot] = c10::IValue();
  }
  ValueStack stack;
  for (const auto& step : steps_) {
    run_step(step, frame, stack, context);
  }
  ValueStack results;
  for (const auto& output : outputs_) {
    results.push_back(value_of(output, frame, context));
  }
  return results;
}

GraphPlan::GraphPlan(const Graph& graph) {
  PlanBuilder(*this).build(graph);
}

}  // namespace ddp::detail
