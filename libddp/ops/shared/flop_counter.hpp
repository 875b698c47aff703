// SPDX-License-Identifier: Apache-2.0
// Counts the FLOPs of a step by the rules of PyTorch's torch.utils.flop_counter: matrix products,
// convolutions and attention, forward and backward, 2 for each multiply-add. Causal attention
// counts as full, and its backward with the recomputed scores. Unlike PyTorch, a grouped
// convolution's weight gradient counts without the other groups.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace ddp::ops::detail {

/// Counts ops that this thread starts, and the backwards that it runs, also on autograd's threads.
/// Beside another counter of the process it counts nothing. A replay of a CUDA graph starts no ops.
class FlopCounter {
 public:
  FlopCounter();
  ~FlopCounter();
  FlopCounter(const FlopCounter&) = delete;
  FlopCounter& operator=(const FlopCounter&) = delete;

  /// Whether ops count from now on.
  void set_paused(bool on);
  double flops() const;
  /// Of most FLOPs: the dtype of the factors, or that to which autocast converts them. Undefined:
  /// none were counted.
  at::ScalarType dtype() const;

 private:
  std::optional<at::CallbackHandle> callback_;  // nothing beside another counter
};

/// An op that computes with kernels of its own, or otherwise than its formula says: counts `flops`
/// of factors of `dtype`, and nothing that the op calls on this thread while this object lives.
class CountedOp {
 public:
  CountedOp(double flops, at::ScalarType dtype);
  ~CountedOp();
  CountedOp(const CountedOp&) = delete;
  CountedOp& operator=(const CountedOp&) = delete;
};

/// Of one pass of a convolution, forward or one of its gradients. `output` is [N, filters, …].
double convolution_flops(const at::Tensor& weight, const at::Tensor& output);
/// Of a product [m, k] times [k, n].
inline double product_flops(int64_t m, int64_t k, int64_t n) {
  return 2.0 * static_cast<double>(m) * static_cast<double>(k) * static_cast<double>(n);
}

}  // namespace ddp::ops::detail
