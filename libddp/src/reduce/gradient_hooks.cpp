// SPDX-License-Identifier: Apache-2.0
#include "reduce/gradient_hooks.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

#include "ddp/core/error.hpp"

namespace ddp::detail {

GradientHooks::GradientHooks(const NamedParameters& parameters,
                             const std::function<void(int)>& on_gradient)
    : parameters_(parameters) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[i].tensor);
    index_of_[accumulator.get()] = i;
    const auto key =
        accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
            [on_gradient, i](const auto& outputs, const auto& /*inputs*/) {
              on_gradient(static_cast<int>(i));
              return outputs;
            }));
    hooks_.push_back({std::move(accumulator), key});
  }
}

GradientHooks::~GradientHooks() {
  for (auto& hook : hooks_) {
    hook.accumulator->del_post_hook(hook.key);
  }
}

void GradientHooks::check_attached() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, tensor] = parameters_[i];
    if (torch::autograd::impl::try_get_grad_accumulator(tensor) != hooks_[i].accumulator) {
      throw SettingsError("parameter " + name +
                          " was replaced after wrapping (module->to(dtype or device)?); fix: "
                          "convert the module before wrapping it");
    }
  }
}

std::vector<bool> GradientHooks::find_trained() const {
  std::vector<bool> trained;
  for (const auto& parameter : parameters_) {
    trained.push_back(parameter.tensor.requires_grad());
  }
  return trained;
}

std::vector<bool> GradientHooks::find_reachable(const std::vector<at::Tensor>& outputs) const {
  std::vector<bool> reachable(parameters_.size(), false);
  std::vector<torch::autograd::Node*> stack;
  std::unordered_set<torch::autograd::Node*> seen;
  const auto visit = [&](torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) {
      stack.push_back(node);
    }
  };
  for (const auto& output : outputs) {
    if (output.defined() && output.requires_grad()) {
      visit(torch::autograd::impl::gradient_edge(output).function.get());
    }
  }
  while (!stack.empty()) {
    auto* node = stack.back();
    stack.pop_back();
    const auto found = index_of_.find(node);
    if (found != index_of_.end()) {
      reachable[found->second] = true;
    }
    for (const auto& edge : node->next_edges()) {
      visit(edge.function.get());
    }
  }
  return reachable;
}

}  // namespace ddp::detail
