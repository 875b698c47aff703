// SPDX-License-Identifier: Apache-2.0
// A CUDA graph whose capture can be abandoned, with readable failure reasons.
#pragma once

#include <ATen/cuda/CUDAGraph.h>
#include <ATen/record_function.h>

#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "train/graph/step_kernels.hpp"

namespace ddp::detail {

/// A failed capture of at::cuda::CUDAGraph leaves the allocator and the generators capturing; this
/// class resets them.
class CapturedGraph : public at::cuda::CUDAGraph {
 public:
  CapturedGraph() : CUDAGraph(/*keep_graph=*/true) {}
  ~CapturedGraph() { abandon(); }

  /// Starts capturing the current stream's work; the feed is the first node.
  void begin(at::cuda::MempoolId_t pool, const std::vector<at::Generator>& generators,
             const FeedArguments& feed);
  /// Throws if the capture is incomplete: work on streams that were not joined, or an operation not
  /// permitted in captures whose error was lost.
  void end();
  /// After begin() without end(), or after a throwing end(): ends the capture and frees the pool's
  /// memory. Otherwise does nothing.
  void abandon() noexcept;

  /// "copies 4 bytes from host memory": accesses of a replay to host memory that may be freed by
  /// then. Empty: none.
  std::string host_copies() const;
  int64_t num_nodes() const;

  /// Enqueues the graph with other arguments of the feed.
  void launch(const FeedArguments& feed);

 private:
  bool begun_ = false;
  cudaGraphNode_t feed_node_ = nullptr;
};

/// Records the operation that first raised an exception during this object's lifetime, on all
/// threads, because backward has its own threads.
class FailingOperation {
 public:
  FailingOperation();
  ~FailingOperation();
  FailingOperation(const FailingOperation&) = delete;
  FailingOperation& operator=(const FailingOperation&) = delete;

  /// "aten::_local_scalar_dense, in aten::item"; empty: none was recorded.
  std::string names() const;

 private:
  at::CallbackHandle handle_;
};

/// Why a capture failed, for a message: from the exception and its first operation.
std::string capture_failure(const std::exception_ptr& error, const std::string& operation);

}  // namespace ddp::detail
