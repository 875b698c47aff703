// SPDX-License-Identifier: Apache-2.0
// Convolutions by the fastest of the engines that cuDNN's heuristics propose for a shape.
// LibTorch's benchmark times each engine once, launched by the host, and so mostly measures the
// host. It may choose either of two kernels of 5.7 and 10.3 us, and runs of a program differ.
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
  bool concurrent = false;  ///< other kernels overlap: separate choice of an engine
};

/// Writes the result of `pass`. Returns false and writes nothing if cuDNN is unavailable, has
/// another major version than LibTorch's, or cannot serve the call. It needs three tensors of bf16
/// or fp16 on one GPU, channels last, 16-byte aligned. cuDNN's benchmark must be enabled and
/// deterministic algorithms disabled. It cannot serve shapes first met in a capture, or without a
/// working engine (cuDNN's refusal is logged once).
///
/// The first call of a shape measures its engines while the host waits. The process keeps one
/// engine per shape. A call without memory for the workspace also returns false.
bool convolve_by_cudnn(ConvolutionPass pass, const Convolution& call);

}  // namespace ddp::ops::detail
