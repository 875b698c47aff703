// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/train/graphed_step.hpp"
#include "train/graph/captured_graph.hpp"
#include "train/graph/graph_pool.hpp"
#include "train/graph/step_feed.hpp"
#include "train/graph/step_ring.hpp"

namespace ddp::detail {

/// One graph with its own inputs.
class CapturedStep {
 public:
  struct Request {
    const StepFeed& feed;
    const StepRing& ring;
    GraphPool& pool;
    const std::vector<at::Generator>& generators;
    StepCall& call;
    uint64_t sequence;
    const std::function<void()>& at_end;  ///< captured after the step, unless it threw
    int64_t step_bytes;                   ///< an eager step's peak memory; 0: not known
  };

  /// Captures request.call.run on its inputs, which become this graph's. Executes nothing. Throws
  /// what the step throws; `failing` then receives the operation.
  static std::unique_ptr<CapturedStep> capture(const Request& request, std::string* failing);

  /// Call after all ranks have captured.
  void instantiate();
  /// Enqueues one step on `inputs`, which have the shapes of the captured ones.
  void replay(const StepNumbers& numbers, uint64_t sequence,
              const std::vector<at::Tensor*>& inputs);

  const std::shared_ptr<const void>& object() const { return object_; }
  int num_scalars() const { return num_scalars_; }
  int64_t num_nodes() const;

 private:
  CapturedStep(const StepFeed& feed, GraphPool& pool);
  void make_inputs(const Request& request);
  void set_arguments(const StepNumbers& numbers, uint64_t sequence,
                     const std::vector<at::Tensor*>& from);
  void run(const Request& request);

  FeedArguments arguments_;
  std::vector<at::Tensor> inputs_;                   // the graph's own, in the batch's order
  const std::shared_ptr<const GraphPool::Id> pool_;  // outlives the graph
  CapturedGraph graph_;
  std::shared_ptr<const void> object_;  // destroyed before the graph, which owns its memory
  int num_scalars_ = 0;
};

}  // namespace ddp::detail
