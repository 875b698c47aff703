// SPDX-License-Identifier: Apache-2.0
// Forward work beside the main chain: a shortcut's convolution while the branch's kernels run.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <functional>
#include <optional>

namespace ddp::ops {

/// Runs `make(input)` at once, on CUDA on a second stream that goes with the current one, beside
/// what the caller enqueues until wait(); elsewhere, or with `beside` false, on the current stream.
/// Also inside a CUDA graph's capture. Autograd runs the backward of what `make` did on that stream
/// too, beside the rest of the backward, and makes streams wait for each other where gradients
/// pass.
///
/// Pays for kernels too short to fill the GPU. The memory of input and result goes back to the
/// allocator only after both streams are done with it; inside a capture, when that ends.
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
