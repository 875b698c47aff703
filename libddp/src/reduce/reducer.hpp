// SPDX-License-Identifier: Apache-2.0
// Reduces the gradients of one model in buckets while backward runs. DataParallelModel drives it.
//
// After a synchronised backward .grad of every parameter is the mean over the ranks and a view of
// its bucket. The user calls no function at the end: the last ready bucket queues it on the
// autograd engine, so .grad is complete when backward() returns (on CUDA: in the order of the
// caller's current stream).
//
// The parts, from the bottom up: GradientArena (memory), WeightedMean (divisor),
// BucketReductions (collectives), UnusedParameters, BucketTuner (layout), PassTiming,
// BufferBroadcast, and on top of them BackwardPass (hooks -> ready -> launch -> finish).
//
// What undoes or replaces the host's state that backwards left (Local is a part of State):
//
//   event                            | calls                     | Local         | rest of State
//   other ranks of a join go on      | take_local, restore_local | as before     | goes on
//   a captured step is replayed      | restore_local             | the capture's | goes on
//   a capture failed                 | state, restore            | as before     | as before
//   a step was rehearsed             | state, restore            | as before     | as before
//   a backward threw                 | join_broken_backward      | dropped       | as before
//   a weighted_backward threw before | WeightedMean::undo_add    | its counts    | goes on
//   it began a reduction             |                           | as before     |
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/listeners.hpp"
#include "ddp/comm/communicator.hpp"
#include "ddp/core/state_dict.hpp"
#include "ddp/reduce/comm_hook.hpp"
#include "ddp/reduce/logging_data.hpp"
#include "ddp/reduce/options.hpp"
#include "reduce/backward_pass.hpp"
#include "reduce/step_guard.hpp"

namespace ddp {

class Reducer {
 public:
  /// `parameters` require gradients and are equal on all ranks (the caller has checked). `sparse`:
  /// see GradientArena.
  Reducer(NamedParameters parameters, CommunicatorPtr communicator, const DdpOptions& options,
          const std::vector<bool>& sparse = {});

  /// Call this before a forward that will be synchronised, on every rank. The first call compares
  /// the names of the comm hooks (MismatchError, on all ranks). The first call with a known ready
  /// order and without parts of means (ZeRO-1) lays the buckets out in rank 0's order. Both are
  /// collective.
  void begin_forward();
  /// Expects a synchronised backward. With find_unused_parameters this walks the graph from
  /// `outputs`. If two backwards follow two forwards, outputs identify the forward of each
  /// backward. Throws MismatchError naming the parameters that the previous backward
  /// left without a gradient.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs) {
    guard_.check_complete();
    pass_.expect(outputs);
  }
  /// Call after a forward whose backward must not be reduced.
  void record_local_forward(const std::vector<at::Tensor>& outputs) {
    guard_.drop_stale_counts();
    pass_.record_local_forward(outputs);
  }
  /// The number of synchronised backwards that ended.
  int64_t num_passes() const { return pass_.history().num_passes; }
  /// Takes part in a synchronised backward of the other ranks with zeros. Overwrites .grad with
  /// their means: call take_local() first to keep this rank's gradients. Collective.
  void run_backward_with_zeros() { pass_.run_with_zeros(); }

  /// Call this before every forward that records gradients, before any other collective. Does
  /// nothing unless the last synchronised backward threw an exception. Then all ranks complete the
  /// reductions of that backward and drop its gradients: every .grad becomes undefined and the
  /// counts of weighted_backward become 0. Throws MismatchError if the backward of another rank did
  /// not throw, because the replicas have diverged. Collective after an exception.
  void join_broken_backward();
  /// Makes the current stream (on the CPU: the host) wait for buffers in flight and for reductions
  /// of a backward that an exception ended. Call this before parameters or buffers are read or
  /// written from outside, and before a capture.
  void finish_pending();

  /// Replaces the reduction. Call this before the first synchronised forward. Throws SettingsError
  /// if `hook` is null or a hook is already set.
  void register_comm_hook(std::shared_ptr<CommHook> hook);
  /// From now on a synchronised backward reduces on each rank only its part of every bucket, by a
  /// reduce-scatter: GradientArena::bucket_shard(). The rest of .grad is unspecified, so adding
  /// another backward to it throws SettingsError. For one optimizer that updates those parts; call
  /// it on all ranks before the first synchronised backward. Throws SettingsError with a comm hook,
  /// and the second time.
  void shard_gradients();
  /// Called after the buckets were laid out again.
  detail::Listeners& layout_listeners() { return layout_listeners_; }

  detail::GradientArena& gradients() { return parts_.gradients; }
  const detail::GradientArena& gradients() const { return parts_.gradients; }
  detail::BucketReductions& reductions() { return parts_.reductions; }
  detail::WeightedMean& mean() { return parts_.mean; }
  detail::PassTiming& timing() { return parts_.timing; }
  detail::BufferBroadcast& buffers() { return parts_.buffers; }
  const detail::StepGuard& guard() const { return guard_; }
  DdpLoggingData logging_data();

  /// This rank's own gradients and counts, with copies of those in buckets.
  struct Local {
    std::vector<detail::GradientArena::Saved> gradients;
    detail::WeightedMean::Counts counts;
    std::vector<bool> used;
  };
  /// Removes and returns this rank's gradients and counts. Afterwards each .grad is undefined, and
  /// no parameter counts as used.
  Local take_local();
  void restore_local(const Local& local);
  /// Calls `add_count`, then loss_sum.backward(). The count belongs to the gradients of this
  /// backward. If it throws before it began a reduction, the counts are as before.
  void run_weighted(const at::Tensor& loss_sum,
                    const std::function<void(detail::WeightedMean&)>& add_count);

  /// Whether a backward may be captured: no rebuild will follow and the hooks were compared.
  bool is_settled() const;
  /// Steps of the model may run as CUDA graphs. A replay runs none of the host's side of a forward,
  /// so what the ranks compare there is compared once.
  bool& runs_in_graphs() { return runs_in_graphs_; }
  /// Returns why a backward can never be captured with these settings; empty if it can.
  std::string why_not_captured() const;
  /// The host's state that a training step changes. A failed capture restores it, because a capture
  /// runs only the host's side of a step.
  struct State {
    Local local;
    detail::UnusedParameters::History unused;
    detail::BackwardPass::History history;
    detail::BufferBroadcast::State buffers;
  };
  State state() const;
  /// A hash of what a backward finds: where each .grad lies, whether it is a mean or waits for one,
  /// and which parameters were used.
  uint64_t hash_gradients() const;
  /// Afterwards no pass is open. On the CPU this waits for reductions that began, so every rank
  /// must have begun them.
  void restore(const State& state);

 private:
  Local local(bool copies) const;
  void drop_local();
  void compare_hooks();

  detail::ReducerParts parts_;
  detail::BackwardPass pass_;
  detail::StepGuard guard_;
  std::vector<int64_t> initial_bucket_bytes_;
  bool has_compared_hooks_ = false;
  bool runs_in_graphs_ = false;
  detail::Listeners layout_listeners_;
};

namespace detail {
/// Returns why replays of a step captured from `before` to now would not repeat it; empty if they
/// would.
std::string why_not_replayed(Reducer& reducer, const Reducer::State& before);
}  // namespace detail

}  // namespace ddp
