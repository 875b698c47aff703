// SPDX-License-Identifier: Apache-2.0
#include "reduce/gradient_hooks.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>
#include <utility>

#include "ddp/core/error.hpp"

namespace ddp::detail {
namespace {

class BeforeAddition : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeAddition(std::function<void()> call) : call_(std::move(call)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    if (grads[0].defined()) {  // else AccumulateGrad does nothing
      call_();
    }
    return grads;
  }

 private:
  const std::function<void()> call_;
};

}  // namespace

GradientHooks::GradientHooks(const NamedParameters& parameters,
                             const std::function<void(int)>& on_gradient,
                             const std::function<void(int)>& before_addition)
    : parameters_(parameters) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[i].tensor);
    index_of_[accumulator.get()] = i;
    auto before = std::make_unique<BeforeAddition>(
        [before_addition, i] { before_addition(static_cast<int>(i)); });
    const auto* const added = before.get();
    accumulator->add_pre_hook(std::move(before));
    const auto key =
        accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
            [on_gradient, i](const auto& outputs, const auto& /*inputs*/) {
              on_gradient(static_cast<int>(i));
              return outputs;
            }));
    hooks_.push_back({std::move(accumulator), key, added});
  }
}

GradientHooks::~GradientHooks() {
  for (auto& hook : hooks_) {
    hook.accumulator->del_post_hook(hook.key);
    std::erase_if(hook.accumulator->pre_hooks(),
                  [&](const auto& known) { return known.get() == hook.before; });
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
