// SPDX-License-Identifier: Apache-2.0
// Side streams: work that overlaps a model's main chain of kernels. This pays where kernels are too
// short to fill the GPU. Results are the same bit for bit, also in a CUDA graph.
//
//   forward   main   | conv | norm | conv | norm, add | ...         | end of the scope: waits
//             side   | SideTask: 1x1 conv             | start(), prefetch_filter()
//
//   backward  main   | norm | dgrad | norm | dgrad | ...            | end of backward(): waits
//             side          | dgrad of the 1x1 conv
//             third                 | wgrad        | wgrad | ...
//
// Nothing in a backward waits for a weight gradient. conv2d therefore computes it on a third
// stream, after the input's gradient, if the parameter has a grad slot (weight_gradient.hpp).
// stem_convolution does not: its gradient is the last one.
//
// Every stream has its own side streams, so threads with different streams are independent. On a
// CPU all work stays on its only stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace ddp::ops {

/// A tensor made on the side stream, such as a shortcut's convolution during the branch's kernels.
///
/// Runs `make(input)` at once. In an enabled SideStreams scope on CUDA it uses the side stream and
/// overlaps the caller's work until wait(); elsewhere it uses the current stream. Autograd runs the
/// backward of `make` on the side stream too, and orders the streams where gradients pass.
///
/// The memory of input and result returns to the allocator when both streams are done with it;
/// inside a capture, after the capture.
class SideTask {
 public:
  SideTask(const at::Tensor& input, const std::function<at::Tensor(const at::Tensor&)>& make);

  /// The result; the current stream, not the host, waits for it.
  at::Tensor wait();

 private:
  at::Tensor result_;
  std::optional<c10::Event> done_;
};

/// In this scope, ops and models on this thread may use side streams of the current stream.
class SideStreams {
 public:
  /// Scopes nest: if this or an outer scope is not `enabled`, all work stays on the current stream.
  /// Tensors that weight gradients read stay alive until the backward waits for the gradients: at
  /// its end, or when the tensors exceed `max_held_bytes` of this or an outer scope.
  explicit SideStreams(bool enabled = true, int64_t max_held_bytes = int64_t{1} << 30);
  /// The current stream, not the host, waits for the work of start() and prefetch_filter().
  ~SideStreams();
  SideStreams(const SideStreams&) = delete;
  SideStreams& operator=(const SideStreams&) = delete;

  /// Runs `work` at once, on CUDA on the side stream. For work whose tensors outlive the scope.
  void start(c10::Device device, const std::function<void()>& work);

  // For ops, about this thread's innermost scope:

  /// The side stream of `device`'s current stream; nullopt if work stays on the current stream.
  static std::optional<c10::Stream> side_stream(c10::Device device);
  /// The bytes that weight gradients of ops called now may hold; 0: they stay on the main stream.
  static int64_t held_bytes_limit();
  /// Starts a filter's matrix for one stride and dtype. Does nothing without an enabled scope.
  static void prefetch(const at::Tensor& weight, int64_t stride, at::ScalarType dtype,
                       const std::function<at::Tensor(const at::Tensor&)>& make);
  /// The matrix of prefetch(), ready for the current stream; undefined if there is none.
  static at::Tensor find(const at::Tensor& weight, int64_t stride, at::ScalarType dtype);

 private:
  struct Prefetched {
    at::Tensor weight;
    int64_t stride;
    at::ScalarType dtype;
    SideTask matrix;
  };

  SideStreams* outer_;  // nullptr: outermost
  bool enabled_;
  int64_t max_held_bytes_;
  std::vector<Prefetched> prefetched_;
  std::optional<c10::Stream> unjoined_;  // waited for when the scope ends
};

/// Starts, on the side stream, the dense matrix of a 3x3 filter that conv2d would make between two
/// layers' kernels: for x of height x width pixels in autocast's dtype, else the weight's. conv2d
/// uses the matrix until this thread's innermost SideStreams scope ends. The matrix has the
/// weight's current values, so the weight must not change before its last conv2d. Does nothing if
/// conv2d needs no matrix, and outside an enabled scope.
void prefetch_filter(const at::Tensor& weight, int64_t stride, int64_t height, int64_t width);

}  // namespace ddp::ops
