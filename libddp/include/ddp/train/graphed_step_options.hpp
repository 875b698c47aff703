// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace ddp {

/// Whether a step runs as one CUDA graph.
enum class CudaGraph {
  Auto,  ///< on a GPU, where the step can be captured; said once where it cannot, and why
  On,    ///< a step that cannot be captured is an error
  Off
};

struct GraphedStepOptions {
  CudaGraph mode = CudaGraph::Auto;
  /// Steps run eagerly before the first capture: by then cuDNN has chosen its algorithms, NCCL is
  /// connected, the buckets have their final order and the optimizer has its state. At least 1; a
  /// model whose buckets are still to be laid out anew adds steps. Every further graph (another
  /// shape, or one captured anew) is preceded by one eager step of its own.
  int64_t warmup_steps = 3;
  /// Kept at a time; further kinds of batches run eagerly, as do those that come again only after
  /// 256 others (or max_graphs others, where that is more) that have no graph.
  int64_t max_graphs = 8;
  /// False: the step calls no collective (an evaluation), and ranks need not run it alike.
  bool collective = true;
  std::string name = "the training step";  ///< in messages
};

}  // namespace ddp
