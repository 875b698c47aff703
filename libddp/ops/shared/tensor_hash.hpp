// SPDX-License-Identifier: Apache-2.0
// Hashes of tensors' bits, to compare them between ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace ddp::ops {

/// Returns a hash of each tensor's bytes in memory order: int64 [tensors] on `device`. A changed
/// 64-bit word always changes its tensor's hash, and two changed words do with a chance of 1 -
/// 2^-64. The hash does not depend on the device or on the alignment of the memory. Tensors of
/// other devices are copied. The host waits only for those.
at::Tensor hash_tensors(const std::vector<at::Tensor>& tensors, at::Device device);

}  // namespace ddp::ops
