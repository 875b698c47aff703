// SPDX-License-Identifier: Apache-2.0
// Activation checkpointing of a graph.
#include <ATen/core/grad_mode.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/detail/model_weights.hpp"
#include "ddp/ops/language.hpp"
#include "export/stack_functions.hpp"

namespace ddp::detail {
namespace {

// For each input of the graph, the names of values that may share its memory.
std::vector<std::set<std::string>> own_names(const Graph& graph) {
  std::vector<std::set<std::string>> names;
  for (const auto& input : graph.inputs) {
    names.emplace_back();
    if (const auto* name = input.name()) {
      names.back().insert(name->name);
    }
  }
  return names;
}

bool mentions(const Argument& argument, const std::set<std::string>& names) {
  bool found = false;
  visit_names(argument, [&](const std::string& name) { found = found || names.count(name) != 0; });
  return found;
}

void add_results(const Node& node, std::set<std::string>& names) {
  for (const auto& output : node.outputs) {
    visit_names(output, [&](const std::string& name) { names.insert(name); });
  }
}

// What a node does with the memory behind one of its arguments.
enum class Access { Read, View, Write };

// Normalization writes its running statistics, and its schema does not say so. A graph in the node
// may do anything.
Access access(const Node& node, const std::string& argument) {
  const auto handle = find_operator(node.target);
  if (!handle) {
    return node.target.starts_with("torch.ops.") ? Access::Write : Access::Read;
  }
  if (argument.starts_with("running_")) {
    return Access::Write;
  }
  for (const auto& parameter : handle->schema().arguments()) {
    if (parameter.name() == argument && parameter.alias_info() != nullptr) {
      return parameter.alias_info()->isWrite() ? Access::Write : Access::View;
    }
  }
  return Access::Read;
}

std::vector<bool> written_inputs(const Graph& graph) {
  auto names = own_names(graph);
  std::vector<bool> written(graph.inputs.size(), false);
  for (const auto& node : graph.nodes) {
    for (const auto& argument : node.inputs) {
      const auto kind = access(node, argument.name);
      for (std::size_t i = 0; kind != Access::Read && i < names.size(); ++i) {
        if (mentions(argument.value, names[i])) {
          written[i] = written[i] || kind == Access::Write;
          add_results(node, names[i]);
        }
      }
    }
  }
  return written;
}

bool is_tensor(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined();
}

/// One call: what the second run needs beside the tensors that autograd saves.
class Call {
 public:
  Call(std::shared_ptr<const GraphPlan> plan, const CallContext& context)
      : plan_(std::move(plan)), device_(context.device) {
    if (context.overrides != nullptr) {
      overrides_ = *context.overrides;
    }
  }

  /// Returns the tensors among `inputs` that the graph only reads. Of the others the second run
  /// gets copies as they are now.
  std::vector<at::Tensor> take(ValueStack inputs, const std::vector<bool>& written) {
    std::vector<at::Tensor> tensors;
    inputs_ = std::move(inputs);
    copies_.resize(inputs_.size());
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (!is_tensor(inputs_[i])) {
        continue;
      }
      if (written[i]) {
        copies_[i] = inputs_[i].toTensor().clone();
      } else {
        places_.push_back(i);
        tensors.push_back(inputs_[i].toTensor());
        inputs_[i] = c10::IValue();
      }
    }
    return tensors;
  }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& tensors) {
    auto inputs = inputs_;
    for (std::size_t k = 0; k < places_.size(); ++k) {
      inputs[places_[k]] = tensors[k];
    }
    for (std::size_t i = 0; ops::is_recomputing() && i < copies_.size(); ++i) {
      if (copies_[i].defined()) {
        inputs[i] = copies_[i].clone();  // a retained graph may be run again
      }
    }
    auto outputs =
        plan_->run(std::move(inputs), {device_, overrides_.empty() ? nullptr : &overrides_});
    std::vector<at::Tensor> results;
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (is_tensor(outputs[i])) {
        places.push_back(i);
        results.push_back(outputs[i].toTensor());
        outputs[i] = c10::IValue();
      }
    }
    if (!ops::is_recomputing()) {
      results_ = std::move(outputs);
      result_places_ = std::move(places);
    }
    return results;
  }

  /// The graph's results: `tensors` among its other values.
  ValueStack results(const std::vector<at::Tensor>& tensors) const {
    auto results = results_;
    for (std::size_t k = 0; k < tensors.size(); ++k) {
      results[result_places_[k]] = tensors[k];
    }
    return results;
  }

 private:
  std::shared_ptr<const GraphPlan> plan_;
  at::Device device_;
  OperatorOverrides overrides_;
  ValueStack inputs_, results_;                      // None where tensors go
  std::vector<std::size_t> places_, result_places_;  // of these tensors
  std::vector<at::Tensor> copies_;                   // of written inputs
};

// A recorded value must not change inside: autograd would not see it.
bool can_run_again(const ValueStack& inputs, const std::vector<bool>& written) {
  bool is_recorded = false;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (is_tensor(inputs[i]) && inputs[i].toTensor().requires_grad()) {
      if (written[i]) {
        return false;
      }
      is_recorded = true;
    }
  }
  return is_recorded && at::GradMode::is_enabled();
}

}  // namespace

StackFunction checkpointed_call(const Node& node) {
  std::shared_ptr<const GraphPlan> plan;
  std::vector<bool> written;
  for (const auto& input : node.inputs) {
    if (const auto* graph = input.value.graph()) {
      if (plan != nullptr) {
        throw DataError("activation checkpointing takes one graph");
      }
      plan = std::make_shared<const GraphPlan>(**graph);
      written = written_inputs(**graph);
    }
  }
  if (plan == nullptr) {
    throw DataError("activation checkpointing takes one graph");
  }
  return [plan, written](ValueStack& stack, const CallContext& context) {
    if (stack.size() != plan->num_inputs()) {
      throw DataError("its arguments do not fit the graph");
    }
    if (!can_run_again(stack, written)) {
      stack = plan->run(std::move(stack), context);
      return;
    }
    const auto call = std::make_shared<Call>(plan, context);
    const auto inputs = call->take(std::move(stack), written);
    const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> body =
        [call](const std::vector<at::Tensor>& tensors) { return call->run(tensors); };
    const auto tensors = ops::checkpoint(body, inputs);
    stack = call->results(tensors);
  };
}

}  // namespace ddp::detail
