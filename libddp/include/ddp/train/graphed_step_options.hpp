// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace ddp {

/// Whether a step runs as one CUDA graph.
enum class CudaGraph {
  Auto,  ///< on a GPU if the step can be captured; else logs the reason once
  On,    ///< a step that cannot be captured is an error
  Off
};

struct GraphedStepOptions {
  CudaGraph mode = CudaGraph::Auto;
  /// Eager steps before the first capture. They let cuDNN choose its algorithms, NCCL connect, the
  /// buckets reach their final order and the optimizer make its state. At least 1; a pending bucket
  /// rebuild adds steps. Every further graph (another shape, or a re-capture) is preceded by one
  /// eager step of its own.
  int64_t warmup_steps = 3;
  /// Graphs cached at a time; further kinds of batches run eagerly. A kind that recurs only after
  /// 256 other kinds without a graph (or max_graphs, if more) runs eagerly too.
  int64_t max_graphs = 8;
  /// False: the step calls no collective (an evaluation), and ranks need not run it alike.
  bool collective = true;
  std::string name = "the training step";  ///< in messages
};

}  // namespace ddp
