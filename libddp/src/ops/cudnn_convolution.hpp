// SPDX-License-Identifier: Apache-2.0
// Convolutions by cuDNN's engines, the fastest of those that its heuristics propose for a shape.
// LibTorch's own benchmark times each engine once, launched by the host, whose pace it then mostly
// measures: of two kernels of 5.7 and 10.3 us either may be taken, and runs of a program differ.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace ddp::ops::detail {

enum class ConvolutionPass {
  Forward,         ///< x, w -> y
  InputGradient,   ///< w, y -> x
  WeightGradient,  ///< x, y -> w
};

/// A convolution without bias, dilation or groups: x [batch, channels, height, width],
/// w [filters, channels, size, size], y its result.
struct Convolution {
  at::Tensor x, w, y;
  int64_t stride, padding;
  bool beside = false;  ///< other kernels run at the same time: chosen for itself
};

/// Writes the tensor that `pass` makes. False, and nothing is written, where cuDNN is not at hand
/// or the call is not one for it: other than three tensors of bf16 or fp16 on one GPU, channels
/// last and at addresses that vectors of 16 bytes can be read from; cuDNN's benchmark not wanted,
/// or deterministic algorithms; a shape that is met in a capture first; no engine that runs here
/// (what cuDNN refuses is said once); another major version of cuDNN than LibTorch's.
///
/// The first call of a shape measures its engines, and the host waits. One a process and shape, but
/// where its workspace cannot be had once, which is false too.
bool convolve_by_cudnn(ConvolutionPass pass, const Convolution& call);

}  // namespace ddp::ops::detail
