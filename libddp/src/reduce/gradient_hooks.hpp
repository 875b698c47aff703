// SPDX-License-Identifier: Apache-2.0
// Hooks that run before and after autograd accumulates the gradient of a parameter, and a search
// for the parameters that a backward reaches.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "ddp/core/state_dict.hpp"
#include "ops/shared/libtorch_versions.hpp"

namespace ddp::detail {

class GradientHooks {
 public:
  /// `on_gradient(index)` runs on the engine's thread each time parameter `index` gets a gradient.
  /// `before_addition(index)` runs before it, if AccumulateGrad is about to add to .grad.
  GradientHooks(
      const NamedParameters& parameters, const std::function<void(int)>& on_gradient,
      const std::function<void(int)>& before_addition = [](int) {});
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  /// Throws SettingsError if a parameter was replaced after construction, because its hook would
  /// never run.
  void check_attached() const;
  /// Returns per parameter whether it requires a gradient now.
  std::vector<bool> find_trained() const;
  /// Returns per parameter whether a backward from `outputs` reaches it. Walks the graph.
  std::vector<bool> find_reachable(const std::vector<at::Tensor>& outputs) const;

 private:
  struct Hook {
    NodePointer accumulator;  // kept alive: the tensor holds it weakly
    uintptr_t key = 0;        // of the hook after
    const torch::autograd::FunctionPreHook* before = nullptr;
  };
  const NamedParameters parameters_;
  std::vector<Hook> hooks_;
  std::unordered_map<torch::autograd::Node*, size_t> index_of_;
};

}  // namespace ddp::detail
