// SPDX-License-Identifier: Apache-2.0
// A CUDA graph whose capture can be abandoned.
#pragma once

#include <ATen/cuda/CUDAGraph.h>

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

}  // namespace ddp::detail
