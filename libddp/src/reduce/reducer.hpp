// SPDX-License-Identifier: Apache-2.0
// Reduces the gradients of one model in buckets while backward runs. DataParallelModel drives it.
//
// After a synchronised backward .grad of every parameter is the mean over the ranks and a view of
// its bucket. Nobody calls an end: the last ready bucket queues it on the autograd engine, so .grad
// is complete when backward() returns (on CUDA: in the order of the caller's current stream).
//
// The parts, from the bottom up: GradientArena (memory), WeightedMean (divisor),
// BucketReductions (collectives), UnusedParameters, BucketTuner (layout), PassTiming,
// BufferBroadcast, and on top of them BackwardPass (hooks -> ready -> launch -> finish).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/reduce/data_parallel_model.hpp"
#include "reduce/backward_pass.hpp"

namespace ddp {

class Reducer {
 public:
  /// `parameters` require gradients and are equal on all ranks (the caller has checked).
  Reducer(NamedParameters parameters, CommunicatorPtr communicator, const DdpOptions& options);

  /// Call this before a forward that will be synchronised, on every rank. The first call compares
  /// the names of the comm hooks (MismatchError, on all ranks). The call after which the ready
  /// order is known lays the buckets out in rank 0's order, once. Both are collective.
  void begin_forward();
  /// Expects a synchronised backward. With find_unused_parameters the graph is walked from
  /// `outputs`. Where two forwards are followed by two backwards, outputs tell which forward a
  /// backward belongs to. Throws MismatchError naming the parameters that the previous backward
  /// left without a gradient.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs) { pass_.expect(outputs); }
  /// A forward ran whose backward is not to be reduced.
  void note_local_forward() { pass_.note_local_forward(); }
  /// A synchronised forward's outputs live and no backward has reached them.
  bool has_open_forward() { return pass_.has_open_forward(); }
  /// Takes part in a synchronised backward of the other ranks with zeros. Leaves their means in
  /// .grad: take_local() keeps this rank's own. Collective.
  void run_backward_with_zeros() { pass_.run_with_zeros(); }

  /// Call this before every forward that records gradients, before any other collective. Does
  /// nothing unless the last synchronised backward threw an exception. Then all ranks complete the
  /// reductions of that backward and drop its gradients: every .grad becomes undefined and the
  /// counts of weighted_backward become 0. Throws MismatchError where the backward of another rank
  /// did not throw, because the replicas have parted. Collective after an exception.
  void join_broken_backward();
  /// The current stream (on the CPU: the host) waits for buffers on their way and for reductions of
  /// a backward that an exception ended. Call this before parameters or buffers are read or written
  /// from outside, and before a capture.
  void finish_pending();

  /// Replaces the reduction; before the first synchronised forward. Throws SettingsError where
  /// `hook` is null or a hook is set already.
  void register_comm_hook(std::shared_ptr<CommHook> hook);
  /// From now on a synchronised backward reduces on each rank only its part of every bucket, by a
  /// reduce-scatter: GradientArena::bucket_shard(). The rest of .grad is unspecified, so adding
  /// another backward to it throws SettingsError. For one optimizer that updates those parts; call
  /// it on all ranks before the first synchronised backward. Throws SettingsError with a comm hook,
  /// and the second time.
  void shard_gradients();
  /// Called after the buckets were laid out again.
  void add_layout_listener(std::function<void()> listener);

  detail::GradientArena& gradients() { return parts_.gradients; }
  const detail::GradientArena& gradients() const { return parts_.gradients; }
  detail::WeightedMean& mean() { return parts_.mean; }
  detail::PassTiming& timing() { return parts_.timing; }
  detail::BufferBroadcast& buffers() { return parts_.buffers; }
  DdpLoggingData logging_data();

  /// This rank's own gradients and counts, with copies of what lies in buckets.
  struct Local {
    std::vector<detail::GradientArena::Saved> gradients;
    detail::WeightedMean::Counts counts;
    std::vector<bool> used;
  };
  /// Takes them out: each .grad is undefined and no count waits.
  Local take_local();
  void restore_local(const Local& local);
  /// Puts the counts back after a weighted_backward that threw.
  void restore_counts(const detail::WeightedMean::Counts& counts);

  /// No rebuild is to come and the hooks were compared: a backward may be captured.
  bool is_settled() const;
  /// Why a backward can never be captured with these settings; empty: it can.
  std::string why_not_captured() const;
  /// What a training step changes on the host. A failed capture puts it back: a capture runs the
  /// host's side of a step and nothing of the device's.
  struct State {
    Local local;
    detail::UnusedParameters::State unused;
    detail::BackwardPass::History history;
    bool buffers_sent = false;
  };
  State state() const;
  /// No pass is open then. On the CPU reductions that began are waited for, so every rank must have
  /// begun them.
  void restore(const State& state);
  /// A backward ended since `state`.
  bool ran_backward_since(const State& state) const;
  /// Why replays of what was captured since `state` would not repeat it; empty: they would.
  std::string why_not_replayed(const State& state) const;

 private:
  Local local(bool copies) const;
  void compare_hooks();
  void require_all_threw() const;

  detail::ReducerParts parts_;
  detail::BackwardPass pass_;
  std::vector<int64_t> initial_bucket_bytes_;
  bool has_compared_hooks_ = false;
  std::vector<std::function<void()>> layout_listeners_;
};

}  // namespace ddp
