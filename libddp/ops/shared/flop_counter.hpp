// SPDX-License-Identifier: Apache-2.0
// Counts the model FLOPs of a step, for MFU: matrix products, convolutions and attention, forward
// and backward, 2 for each multiply-add. The rules are those of torch.utils.flop_counter, with two
// differences. What is computed again for the backward does not count: a checkpoint's second run,
// the scores of fused attention. A grouped convolution's weight
// gradient counts its own group only.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace ddp::ops::detail {

/// Counts ops that this thread starts, and the backwards that it runs, also on autograd's threads.
/// Only one counter of a process counts. Destroy it on the thread that made it.
class FlopCounter {
 public:
  FlopCounter();
  ~FlopCounter();
  FlopCounter(const FlopCounter&) = delete;
  FlopCounter& operator=(const FlopCounter&) = delete;

  /// Whether ops count from now on.
  void set_paused(bool on);
  /// Whether this counter counts: there was no other when it was made.
  bool is_active() const { return callback_.has_value(); }
  /// NaN if an op has no formula (LibTorch's kernels of recurrent layers), or was not seen (a
  /// replay of a CUDA graph).
  double flops() const;
  /// Of most FLOPs: the dtype of the factors, or that to which autocast converts them. Undefined:
  /// none were counted.
  at::ScalarType dtype() const;
  /// Whether the FLOPs of dtype() are convolutions of float32 factors, not products. Whether TF32
  /// computes them depends on another setting.
  bool are_float_convolutions() const;

 private:
  std::optional<at::CallbackHandle> callback_;  // nothing beside another counter
};

enum class FlopKind { Product, Convolution };

/// Counts `flops` of factors of `dtype`, and nothing that this thread calls while this object
/// lives. For an op with kernels of its own, or one that computes otherwise than its formula says.
class CountedOp {
 public:
  CountedOp(double flops, at::ScalarType dtype, FlopKind kind = FlopKind::Product);
  ~CountedOp();
  CountedOp(const CountedOp&) = delete;
  CountedOp& operator=(const CountedOp&) = delete;
};

/// Call it when ops run that no counter sees, or that it saw twice: the running sum is unknown.
void note_uncounted_ops();

/// Nothing that this thread calls counts while this object lives: it is no part of the model.
class UncountedOps : CountedOp {
 public:
  UncountedOps() : CountedOp(0, at::kFloat) {}
};

/// Of one pass of a convolution, forward or one of its gradients. `output` is [N, filters, …].
double convolution_flops(const at::Tensor& weight, const at::Tensor& output);
/// Of a product [m, k] times [k, n].
inline double product_flops(int64_t m, int64_t k, int64_t n) {
  return 2.0 * static_cast<double>(m) * static_cast<double>(k) * static_cast<double>(n);
}

}  // namespace ddp::ops::detail
