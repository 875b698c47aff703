// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::detail {

/// `tensor` on `device` and of `dtype`. A copy to a GPU is queued. A copy to the host is waited
/// for: LibTorch queues one with non_blocking=true too, and its values would be read before they
/// arrive.
inline at::Tensor on_device(const at::Tensor& tensor, at::Device device, at::ScalarType dtype) {
  return tensor.to(device, dtype, /*non_blocking=*/!device.is_cpu());
}
inline at::Tensor on_device(const at::Tensor& tensor, at::Device device) {
  return on_device(tensor, device, tensor.scalar_type());
}

}  // namespace ddp::detail
