// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "optim/flat/math.hpp"

namespace ddp::detail {

/// Moving averages on a CUDA device, updated by one kernel.
class FlatAverages {
 public:
  /// Whether update() supports this pair together with those of `device`.
  static bool takes(const at::Tensor& average, const at::Tensor& weight, at::Device device);

  /// averages += share * (weights - averages). The host does not wait. The first call, and a call
  /// with other memory, must not be captured.
  void update(const std::vector<at::Tensor>& averages, const std::vector<at::Tensor>& weights,
              double share);

 private:
  std::vector<FlatAverage> entries_;
  at::Tensor table_;   // the same on the device
  at::Tensor chunks_;  // of FlatChunk
};

}  // namespace ddp::detail
