// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/note_board.hpp"
#include "ddp/train/graphed_step.hpp"
#include "reduce/reducer.hpp"
#include "train/capture_agreement.hpp"
#include "train/captured_step.hpp"
#include "train/step_ring.hpp"

namespace ddp::detail {

/// Identifies a graph: the kind of batch, and the modes.
using Key = std::vector<int64_t>;

/// One entry per model.
using HostStates = std::vector<Reducer::State>;

struct GraphedStepCore::State {
  State(Context& ctx, GraphedParts given, GraphedStepOptions opts, std::shared_ptr<GraphPool> p);

  struct Entry {
    Key key;
    std::string shapes;
    bool trains = false;       // has a backward, which depends on the bucket layout
    int64_t eager_steps = 0;   // since the graph, if any, became stale
    int64_t steps_before = 0;  // eager steps before that; one-time searches are done
    bool has_block = false;    // memory is reserved as one block, as the graph's will be
    int64_t step_bytes = 0;    // peak memory of the last eager step
    std::unique_ptr<CapturedStep> graph = nullptr;
    /// For a graph with a backward: which gradients were defined before its capture, and the
    /// reducers' states after it, if other gradients are defined then.
    std::optional<uint64_t> gradients_before = std::nullopt;
    HostStates states_after = {};

    int64_t all_steps() const { return steps_before + eager_steps; }
    void drop_graph();
  };

  void check_job() const;
  void look_at_notes() const;
  void end();
  void make_key(const StepCall& call);
  uint64_t fingerprint() const;
  uint64_t layouts() const;
  void drop_stale_graphs();
  void drop_graphs_of_changed_parts();
  void drop_graphs(bool evaluations);
  uint64_t defined_gradients() const;
  std::string why_not() const;
  bool is_settled() const;
  Entry* find_entry(const StepCall& call);
  int64_t max_remembered() const;
  void warn_of_kinds(const StepCall& call);
  bool may_capture(const Entry& entry) const;
  StepDone run(StepCall& call);
  StepDone run_eager(StepCall& call);
  void give_up(const std::string& reason);
#ifdef DDP_HAS_CUDA
  StepDone run_cuda(StepCall& call);
  StepDone run_numbered(StepCall& call);
  StepDone warm_up(Entry& entry, StepCall& call);
  StepDone replay(Entry& entry, StepCall& call);
  bool capture(Entry& entry, StepCall& call);
  std::string capture_together(Entry& entry, StepCall& call, const HostStates& states);
  void undo_capture(Entry& entry, const HostStates& states);
  bool begins_alike(const Entry& entry) const;
  void note_gradients(Entry& entry, const HostStates& states, uint64_t before) const;
  std::string agree(const CaptureReport& report) const;
  std::vector<Communicator*> communicators() const;
  std::string try_capture(Entry& entry, StepCall& call, std::vector<std::string>* operations);
#endif

  Context& context;
  const GraphedParts parts;
  const GraphedStepOptions options;
  const at::Device device;
  std::shared_ptr<GraphPool> pool;
  std::shared_ptr<StepRing> ring;
#ifdef DDP_HAS_CUDA
  std::optional<StepFeed> feed;
#endif
  bool wanted = false;  // capture is wanted
  bool ended = false;   // the context was closed
  bool too_many_said = false;
  const int64_t id;        // the same on all ranks
  NoteBoard* const board;  // null: ranks need not run alike
  std::string last_shapes;
  uint64_t sequence = 0;       // of the current or last call
  uint64_t calls_done = 0;     // number of the last finished call
  uint64_t last_captured = 0;  // the last call at which all ranks met to capture
  mutable uint64_t notes_seen = 0;
  uint64_t last_fingerprint = 0;
  uint64_t last_layouts = 0;
  Key key;  // of the current call
  std::vector<Entry> entries;
  GraphedStepCounts counts;
};

/// A batch's tensor shapes and other numbers, for messages.
std::string shapes_of(const StepCall& call);

}  // namespace ddp::detail
