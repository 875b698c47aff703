// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <utility>
#include <vector>

namespace models {

/// Puts a module into evaluation mode for its lifetime. Afterwards each submodule has its own mode
/// again: a frozen BatchNorm, for example, stays in evaluation mode.
class EvalScope {
 public:
  /// Puts `module` and its submodules into evaluation mode.
  explicit EvalScope(torch::nn::Module& module) {
    was_training_.emplace_back(&module, module.is_training());
    for (const auto& child : module.modules(/*include_self=*/false)) {
      was_training_.emplace_back(child.get(), child->is_training());
    }
    module.eval();
  }
  ~EvalScope() {
    // train() also switches the children, which follow their parents in the list.
    for (const auto& [module, was_training] : was_training_) {
      module->train(was_training);
    }
  }
  EvalScope(const EvalScope&) = delete;
  EvalScope& operator=(const EvalScope&) = delete;

 private:
  std::vector<std::pair<torch::nn::Module*, bool>> was_training_;
};

}  // namespace models
