// SPDX-License-Identifier: Apache-2.0
// The graphs of one GraphedStep, by kind of batch, and when they become stale.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ddp/train/graphed_step.hpp"

namespace ddp::detail {

/// One captured step, ready for replays.
class StepGraph {
 public:
  virtual ~StepGraph() = default;
  /// Whether the step runs a backward, which depends on the bucket layout.
  virtual bool has_backward() const = 0;
  /// Whether the gradients that a replay accumulates into or overwrites are those of the capture.
  virtual bool gradients_match() const = 0;
  virtual int64_t num_nodes() const = 0;
  /// Enqueues step number `sequence` on the call's inputs.
  virtual StepDone replay(StepCall& call, uint64_t sequence) = 0;
};

/// A batch's tensor shapes and other numbers, for messages.
std::string shapes_of(const StepCall& call);

class StepCache {
 public:
  /// Batches of equal layouts and numbers, in equal modes.
  struct Kind {
    std::vector<int64_t> key;
    std::string shapes;
    /// Grad mode was enabled, or the graph has a backward: depends on the bucket layout.
    bool trains = false;
    int64_t eager_steps = 0;   ///< since the graph, if any, became stale
    int64_t steps_before = 0;  ///< eager steps before that; one-time searches are done
    bool has_block = false;    ///< memory is reserved as one block, as the graph's will be
    int64_t step_bytes = 0;    ///< peak memory of the last eager step
    std::unique_ptr<StepGraph> graph = nullptr;
    // For ReplayCheck, made by the first check: forward and backward alone, and a recorded step.
    std::unique_ptr<StepGraph> rehearsal = nullptr;
    std::unique_ptr<StepGraph> recorded = nullptr;
    bool has_tried_checked = false;  ///< their captures were tried since the graph was made

    int64_t all_steps() const { return steps_before + eager_steps; }
  };

  /// `parts` outlives this object. `is_main`: this rank logs warnings.
  StepCache(const GraphedParts& parts, const GraphedStepOptions& options, at::Device device,
            bool is_main);

  /// Drops all graphs if a part changed, and training graphs if a bucket layout changed.
  void drop_stale();
  /// The same for the parts alone.
  void drop_stale_parts();
  /// The call's kind; null if it has no graph and the number of graphs is at its limit. Valid until
  /// the next find() or clear().
  Kind* find(const StepCall& call);
  void add_graph(Kind& kind, std::unique_ptr<StepGraph> graph);
  /// Forgets all kinds.
  void clear();
  int64_t num_graphs() const { return num_graphs_; }

 private:
  void make_key(const StepCall& call);
  uint64_t parts_fingerprint() const;
  uint64_t layout_versions() const;
  void drop_graphs(bool evaluations);
  int64_t max_kinds_without_graph() const;
  void warn_too_many_kinds(const StepCall& call);

  const GraphedParts& parts_;
  const std::string name_;
  const int64_t max_graphs_;
  const at::Device device_;
  const bool is_main_;
  std::vector<int64_t> key_;  // of the current call
  std::vector<Kind> kinds_;   // those without a graph: the latest last
  int64_t num_graphs_ = 0;
  bool has_warned_ = false;
  uint64_t last_fingerprint_ = 0;
  uint64_t last_layouts_ = 0;
};

}  // namespace ddp::detail
