// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace ddp::detail {

struct NamedTensor {
  std::string name;  ///< "layers.0.norm.weight"
  at::Tensor tensor;
};

/// Registers the tensors under `root`, in submodules for the parts of their names. The orders of
/// named_parameters() and named_buffers() are those of the lists. Throws DataError for a name that
/// is no path.
void register_tree(torch::nn::Module& root, const std::vector<NamedTensor>& parameters,
                   const std::vector<NamedTensor>& buffers);
/// The same for a root that has children, which it replaces. The root's own tensors are the same.
void replace_children(torch::nn::Module& root, const std::vector<NamedTensor>& parameters,
                      const std::vector<NamedTensor>& buffers);

}  // namespace ddp::detail
