// SPDX-License-Identifier: Apache-2.0
// One captured step: its graph, the graph's own inputs, and its effect on the models' host state.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ddp/train/graphed_step.hpp"
#include "ops/shared/libtorch_versions.hpp"
#include "reduce/reducer.hpp"
#include "train/graph/graph_pool.hpp"
#include "train/graph/step_cache.hpp"
#include "train/graph/step_feed.hpp"
#include "train/graph/step_kernels.hpp"
#include "train/graph/step_ring.hpp"

namespace ddp::detail {

/// Hashes which gradients are defined, and their addresses. A backward overwrites undefined
/// gradients and accumulates into defined ones, and a replay reads them where they were captured.
uint64_t hash_gradients(const GraphedParts& parts);

/// Replaces a captured graph's memsets of less than 8 KiB by kernels and returns their number. Call
/// before instantiation. A small memset node is slow: with 100 of them among 200 kernels a launch
/// takes the host 389 us instead of 2.6, and the device 1.1 us longer per memset (CUDA 13.0, H200).
/// Larger memsets, and copies of any size, cost as much as kernels.
int64_t replace_small_memsets(cudaGraph_t graph);

/// A CUDA graph whose capture can be abandoned. A failed capture of at::cuda::CUDAGraph leaves the
/// allocator and the generators capturing; this class resets them.
class CapturedGraph : public VersionedGraph {
 public:
  CapturedGraph() : VersionedGraph(/*keep_graph=*/true) {}
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

class CapturedStep final : public StepGraph {
 public:
  struct Request {
    const StepFeed& feed;
    const StepRing& ring;
    const GraphedParts& parts;
    GraphPool& pool;
    StepCall& call;
    uint64_t sequence;
    const std::function<void()>& at_end;  ///< captured after the step, unless it threw
    int64_t step_bytes;                   ///< an eager step's peak memory; 0: not known
  };

  /// Captures request.call.run on its inputs, which become this graph's. Executes nothing. Throws
  /// what the step throws; `failing` then receives the operation.
  static std::unique_ptr<CapturedStep> capture(const Request& request, std::string* failing);
  /// For a step with a backward. `gradients` is the hash of the gradients before the capture.
  /// `left` has each model's local state after the step, or is empty if the hash did not change.
  void set_backward(uint64_t gradients, std::vector<Reducer::Local> left);
  /// `left` has each model's BufferBroadcast state after the step, or nothing if that state decides
  /// nothing. The kind's key contains the state before the step.
  using BufferStates = std::vector<std::optional<BufferBroadcast::State>>;
  void set_buffers(BufferStates left) { buffers_left_ = std::move(left); }
  void instantiate() { graph_.instantiate(); }

  /// Whether the call was a rehearsal: its graph ends behind the backward, and has no outputs.
  bool is_rehearsal() const { return is_rehearsal_; }

  bool has_backward() const override { return gradients_before_.has_value(); }
  bool gradients_match() const override;
  int64_t num_nodes() const override { return graph_.num_nodes(); }
  StepDone replay(StepCall& call, uint64_t sequence) override;

 private:
  explicit CapturedStep(const Request& request);
  void make_inputs(const Request& request);
  void set_arguments(const StepCall& call, uint64_t sequence);
  void run(const Request& request);

  const GraphedParts& parts_;
  const StepRing& ring_;
  FeedArguments arguments_;
  std::vector<at::Tensor> inputs_;                   // the graph's own, in the batch's order
  const std::shared_ptr<const GraphPool::Id> pool_;  // outlives the graph
  CapturedGraph graph_;
  std::shared_ptr<const void> object_;  // destroyed before the graph, which owns its memory
  int num_scalars_ = 0;
  bool is_rehearsal_ = false;
  std::optional<uint64_t> gradients_before_;
  std::vector<Reducer::Local> left_;  // one per model
  BufferStates buffers_left_;
};

}  // namespace ddp::detail
