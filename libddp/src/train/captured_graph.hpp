// SPDX-License-Identifier: Apache-2.0
// A CUDA graph that can be given up half-way, and what went wrong in words.
#pragma once

#include <ATen/cuda/CUDAGraph.h>
#include <ATen/record_function.h>

#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "train/step_kernels.hpp"

namespace ddp::detail {

/// at::cuda::CUDAGraph leaves the allocator and the generators in the middle of a capture where it
/// fails; this one puts them back.
class CapturedGraph : public at::cuda::CUDAGraph {
 public:
  CapturedGraph() : CUDAGraph(/*keep_graph=*/true) {}
  ~CapturedGraph() { abandon(); }

  /// The current stream's work is captured from here on; the feed is its first node.
  void begin(at::cuda::MempoolId_t pool, const std::vector<at::Generator>& generators,
             const FeedArguments& feed);
  /// Throws where the capture is not whole: work on streams that were not joined, an operation that
  /// is not permitted in captures and whose error was lost.
  void end();
  /// After begin() without end(), or after an end() that threw: nothing is being captured any more,
  /// and the pool's memory is free. Otherwise nothing happens.
  void abandon() noexcept;

  /// "copies 4 bytes from host memory": what a replay would do with memory of the host that may be
  /// gone by then. Empty: nothing.
  std::string host_copies() const;
  int64_t num_nodes() const;

  /// Enqueues it with other arguments of the feed.
  void launch(const FeedArguments& feed);

 private:
  bool begun_ = false;
  cudaGraphNode_t feed_node_ = nullptr;
};

/// Remembers the operation in which an exception began, while it lives: on all threads, for
/// backward runs on its own.
class FailingOperation {
 public:
  FailingOperation();
  ~FailingOperation();
  FailingOperation(const FailingOperation&) = delete;
  FailingOperation& operator=(const FailingOperation&) = delete;

  /// "aten::_local_scalar_dense, in aten::item"; empty: none was seen.
  std::string names() const;

 private:
  at::CallbackHandle handle_;
};

/// Why a capture failed, for a message: from the exception and the operation it began in.
std::string capture_failure(const std::exception_ptr& error, const std::string& operation);

}  // namespace ddp::detail
