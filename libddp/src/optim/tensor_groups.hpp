// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace ddp::detail {

/// Tensors that one foreach call can take.
struct TensorGroup {
  at::Device device;
  at::ScalarType dtype;
  std::vector<at::Tensor> tensors;
};

/// Groups by (device, dtype), in order of first appearance; tensors keep their order.
inline std::vector<TensorGroup> group_tensors(const std::vector<at::Tensor>& tensors) {
  std::vector<TensorGroup> groups;
  for (const at::Tensor& tensor : tensors) {
    TensorGroup* home = nullptr;
    for (TensorGroup& group : groups) {
      if (group.device == tensor.device() && group.dtype == tensor.scalar_type()) {
        home = &group;
        break;
      }
    }
    if (!home) {
      home = &groups.emplace_back(TensorGroup{tensor.device(), tensor.scalar_type(), {}});
    }
    home->tensors.push_back(tensor);
  }
  return groups;
}

}  // namespace ddp::detail
