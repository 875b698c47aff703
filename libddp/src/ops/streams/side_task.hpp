// SPDX-License-Identifier: Apache-2.0
// Forward work concurrent with the main chain, such as a shortcut's convolution during the branch's
// kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <functional>
#include <optional>

namespace ddp::ops {

/// Runs `make(input)` at once. On CUDA `make` uses a side stream of the current stream and overlaps
/// the caller's work until wait(). Elsewhere, or with `beside` false, it uses the current stream.
/// Also works inside a CUDA graph's capture. Autograd runs the backward of `make` on the side
/// stream too, concurrently with the rest, and orders the streams where gradients pass.
///
/// Useful for kernels too short to fill the GPU. The memory of input and result returns to the
/// allocator after both streams are done with it; inside a capture, after the capture.
class SideTask {
 public:
  SideTask(const at::Tensor& input, const std::function<at::Tensor(const at::Tensor&)>& make,
           bool beside = true);

  /// The result; the current stream, not the host, waits for it.
  at::Tensor wait();

 private:
  at::Tensor result_;
  std::optional<c10::Event> done_;
};

}  // namespace ddp::ops
