// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/modules/container/any.h>

#include <memory>
#include <string>
#include <vector>

namespace ddp::ops {

/// A module whose normalisation layers can be replaced after construction (typed members cannot).
/// Models also derive from NormOwner so that convert_sync_batchnorm finds their layers, with a
/// dynamic_cast of each of `module.modules()`.
class NormOwner {
 public:
  virtual ~NormOwner() = default;
  /// Registered names of the direct children that normalise ("bn1", "bn2", …).
  virtual std::vector<std::string> norm_names() const = 0;
  /// The child called `name` (one of norm_names()).
  virtual std::shared_ptr<torch::nn::Module> norm(const std::string& name) const = 0;
  /// Replaces that child by `replacement` (forward(Tensor) -> Tensor), under the same name.
  virtual void replace_norm(const std::string& name, torch::nn::AnyModule replacement) = 0;
};

}  // namespace ddp::ops
