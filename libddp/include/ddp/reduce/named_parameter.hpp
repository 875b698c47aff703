// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace ddp {

/// A parameter or buffer and its dotted name, as in torch::nn::Module::named_parameters.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

using NamedParameters = std::vector<NamedParameter>;

}  // namespace ddp
