// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ddp::ops {

/// Shares batch statistics between processes (SyncBatchNorm). all_gather and all_reduce are
/// collective: every process calls them in the same order with tensors of equal size. The current
/// stream, not the host, waits for the result.
class StatisticsExchange {
 public:
  virtual ~StatisticsExchange() = default;
  virtual int64_t size() const = 0;       ///< processes
  virtual const void* group() const = 0;  ///< equal for the same set of processes
  /// Raises an error for users if a layer of `num_features` channels cannot process `input` or
  /// cannot train on it. Not collective.
  virtual void check_input(const at::Tensor& input, int64_t num_features, bool training) const = 0;
  /// Gathers `mine` [n] of every process: [size, n].
  virtual at::Tensor all_gather(const at::Tensor& mine) = 0;
  /// Sums over all processes, in place.
  virtual void all_reduce(const at::Tensor& sums) = 0;
};

}  // namespace ddp::ops
