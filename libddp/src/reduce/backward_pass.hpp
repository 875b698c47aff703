// SPDX-License-Identifier: Apache-2.0
// One backward: hooks -> ready -> launch -> finish. In time, at world size > 1 (compute stream
// above, communicator below):
//
//   forward | hook hook hook   hook hook       hook  | callback
//           |          gather0      gather1          gather2 | wait, scale, .grad = slots
//           |                \\launch    \\launch         \\launch
//   comm    |                 [reduce 0] [reduce 1 ]    [reduce 2]
//
// gather: one multi-tensor kernel copies the gradients that AccumulateGrad kept into the bucket.
// launch: the communicator's stream waits for the gather and reduces. callback: runs when the whole
// backward is over and makes the *compute stream* (on the CPU: this thread) wait for each
// reduction.
//
// The autograd engine runs the callbacks of a backward only if no exception ended it. So a callback
// that did not run shows that an exception was thrown. This rank may have launched fewer buckets of
// such a backward than another rank. Before the next forward every rank launches the rest and waits
// for all, so that all ranks stay at the same collective.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/launch_sequencer.hpp"
#include "reduce/buckets/bucket_layout.hpp"
#include "reduce/buckets/bucket_reductions.hpp"
#include "reduce/buckets/bucket_tuner.hpp"
#include "reduce/buckets/gradient_arena.hpp"
#include "reduce/gradient_action.hpp"
#include "reduce/gradient_hooks.hpp"
#include "reduce/model/buffer_broadcast.hpp"
#include "reduce/open_forwards.hpp"
#include "reduce/pass_timing.hpp"
#include "reduce/running_backwards.hpp"
#include "reduce/unused_parameters.hpp"
#include "reduce/weighted_mean.hpp"

namespace ddp::detail {

class ReplicaCheck;

/// The parts of a Reducer. Each part knows only the parts above it.
struct ReducerParts {
  ReducerParts(NamedParameters parameters, CommunicatorPtr communicator_in,
               const DdpOptions& options_in, const std::vector<bool>& sparse)
      : communicator(std::move(communicator_in)),
        options(options_in),
        gradients(std::move(parameters), communicator, options, sparse),
        mean(communicator, gradients),
        reductions(communicator, gradients, mean),
        unused(communicator, options, gradients.parameters().size()),
        tuner(communicator, options, gradients, reductions),
        timing(communicator->device(), /*times_replays=*/communicator->world_size() > 1),
        buffers(communicator) {}

  const BucketLayout& layout() const { return gradients.layout(); }

  /// A parameter in messages: "0.weight", or "0.weight of model 'generator'".
  std::string parameter_name(int index) const {
    return gradients.parameters()[static_cast<size_t>(index)].name + of_model();
  }

  std::string of_model() const { return detail::of_model(options); }

  const CommunicatorPtr communicator;
  const DdpOptions options;
  GradientArena gradients;
  WeightedMean mean;
  BucketReductions reductions;
  UnusedParameters unused;
  BucketTuner tuner;
  PassTiming timing;
  BufferBroadcast buffers;
  std::shared_ptr<ReplicaCheck> replicas = nullptr;  // nullptr: off
};

/// Any thread: hooks run on the engine's threads, and another model's hook may launch buckets.
class BackwardPass {
 public:
  explicit BackwardPass(ReducerParts& parts);
  ~BackwardPass();
  BackwardPass(const BackwardPass&) = delete;
  BackwardPass& operator=(const BackwardPass&) = delete;

  /// Call after a synchronised forward. Its backward will be reduced.
  void expect(const std::vector<at::Tensor>& outputs);
  /// Call after a forward under no_sync(). Its backward will not be reduced.
  void record_local_forward(const std::vector<at::Tensor>& outputs);
  /// Names the parameters that the previous backward left without a gradient; empty if none.
  std::string why_incomplete();
  /// Call after the buckets were cut again.
  void follow_layout();
  /// Takes part in a backward of the other ranks with zeros. Collective.
  void run_with_zeros();

  /// Whether an exception ended the expected backward.
  bool threw();
  /// Launches the buckets that were not launched before the exception and waits for all of them.
  /// Collective.
  void complete();

  struct History {
    int64_t num_passes = 0;        // synchronised backwards that ended
    int64_t num_local_passes = 0;  // those under no_sync()
    std::vector<int> ready_order;  // of the last synchronised one

    bool operator==(const History&) const = default;
  };
  const History& history() const { return history_; }
  /// Forgets a pass in progress and its forwards.
  void restore(const History& history);

 private:
  /// The state of one pass. A new pass starts with a new value.
  struct Pass {
    explicit Pass(const BucketLayout& layout) : fires(layout.places.size(), 0) {
      scheduler.reset(layout);
    }
    BucketScheduler scheduler;
    std::vector<int> ready_order;
    std::vector<int> fires;    // static_graph: calls of each parameter's hook
    bool is_expected = false;  // a synchronised forward ran and its backward has not ended
    bool has_marked_unused = false;
    bool counts_fires = false;      // static_graph: in the first pass
    bool has_queued_count = false;  // end_static_count()
  };

  void start();
  void forget_thrown_local();
  void on_forward_reached(Backward reached);
  void before_addition(int index);
  void on_gradient(int index);
  GradientAction action_of(int index) const;
  Backward running_backward(int index) const;
  void record_local_backward();
  void warn_of_unannounced(int index);
  void count_static_gradient(int index);
  void end_static_count();
  void mark_unused_parameters();
  void mark_ready(int index);
  void launch(int index);
  void finish();
  void record_backward();
  void end_backward();
  LaunchSequencer& sequencer() { return parts_.communicator->launch_sequencer(); }

  ReducerParts& parts_;
  const LaunchSequencer::ModelId model_id_;
  std::mutex mutex_;
  Pass pass_;
  History history_;
  GradientHooks hooks_;
  OpenForwards forwards_;
  std::vector<int> expected_fires_;  // static_graph: what the first pass counted
  RunningBackwards running_pass_{mutex_};
  RunningBackwards running_local_{mutex_};
  std::vector<int> local_gradients_;  // move into slots at the end of a local backward
  bool is_repeated_ = false;          // the local backward that runs: Backward::Repeated
  bool has_warned_unannounced_ = false;
};

}  // namespace ddp::detail
