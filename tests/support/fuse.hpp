// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <stdexcept>

namespace ddp::test {

/// The identity. Its backward throws while `blows` is set.
struct Fuse : torch::autograd::Function<Fuse> {
  static inline bool blows = false;
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grads) {
    if (blows) {
      throw std::runtime_error("the fuse blew");
    }
    return grads;
  }
};

}  // namespace ddp::test
