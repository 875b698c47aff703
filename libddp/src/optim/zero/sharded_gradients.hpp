// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::detail {

/// What an optimizer adds whose gradients() are this rank's part only.
class ShardedGradients {
 public:
  /// Sets `found_inf`, 0 or 1 on this rank, to the maximum over the ranks. Collective.
  virtual void agree_on_found_inf(at::Tensor& found_inf) = 0;

 protected:
  ~ShardedGradients() = default;
};

}  // namespace ddp::detail
