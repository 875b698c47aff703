// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ddp/core/safetensors.hpp"

namespace ddp::detail {

/// A torch::nn::Module whose state_dict() in Python differs from its parameters and buffers.
class PythonState {
 public:
  virtual ~PythonState() = default;
  virtual TensorMap state_dict() const = 0;
};

}  // namespace ddp::detail
