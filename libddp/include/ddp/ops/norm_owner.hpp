// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/modules/container/any.h>

#include <memory>
#include <string>
#include <vector>

namespace ddp::ops {

/// A module whose normalisation layers can be exchanged after construction (a typed member cannot).
/// Models implement it beside torch::nn::Module so that convert_sync_batchnorm reaches their
/// layers: walk `module.modules()`, ask each with dynamic_cast.
class NormOwner {
 public:
  virtual ~NormOwner() = default;
  /// Names of the direct children that normalise, as registered ("bn1", "bn2", …).
  virtual std::vector<std::string> norm_names() const = 0;
  /// The child called `name` (one of norm_names()).
  virtual std::shared_ptr<torch::nn::Module> norm(const std::string& name) const = 0;
  /// Puts `replacement` (forward(Tensor) -> Tensor) in its place, under the same name.
  virtual void replace_norm(const std::string& name, torch::nn::AnyModule replacement) = 0;
};

}  // namespace ddp::ops
