// SPDX-License-Identifier: Apache-2.0
// Reduces gradients in buckets while backward runs. DistributedDataParallel drives it; most
// programs never name it.
//
// After a synchronised backward .grad of every parameter is the mean over the ranks and a view of
// the arena (what PyTorch calls gradient_as_bucket_view). Nobody calls an end: the last ready
// bucket queues finalize_backward on the autograd engine, so .grad is complete when backward()
// returns (on CUDA: in the order of the caller's current stream).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/comm/communicator.hpp"
#include "ddp/reduce/bucket_layout.hpp"
#include "ddp/reduce/comm_hook.hpp"
#include "ddp/reduce/ddp_options.hpp"
#include "ddp/reduce/named_parameter.hpp"

namespace ddp {

/// What semantics PyTorch calls DDPLoggingData; times in milliseconds, averaged over the measured
/// backwards (the first 10, then every 100th), 0 where nothing was measured yet.
struct DdpLoggingData {
  int64_t num_parameter_tensors = 0;
  int64_t total_parameter_bytes = 0;
  std::vector<int64_t> bucket_sizes;          ///< bytes, at construction
  std::vector<int64_t> rebuilt_bucket_sizes;  ///< bytes; empty before the rebuild
  std::vector<std::vector<int>> rebuilt_per_bucket_param_indices;
  std::vector<int> prev_iteration_grad_ready_order_indices;
  bool has_rebuilt_buckets = false;
  int64_t unused_parameter_size = 0;  ///< parameters without a gradient here in the last backward
  bool can_set_static_graph = false;  ///< the same parameters were unused in every backward so far
  int64_t num_synchronised_backwards = 0;
  double avg_forward_compute_time = 0;
  double avg_backward_compute_time = 0;
  double avg_backward_comm_time = 0;
  double avg_backward_compute_comm_overlap_time = 0;
};

class Reducer {
 public:
  /// `parameters` require gradients and are equal on all ranks (the caller has checked). Allocates
  /// the arena through the communicator.
  Reducer(NamedParameters parameters, CommunicatorPtr communicator, const DdpOptions& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Sends rank 0's `buffers` to all beside the backward that follows; its end waits for them, or
  /// take_sent_buffers(). Collective.
  void send_buffers(const std::vector<at::Tensor>& buffers);
  /// Whether they were sent since the last call; the current stream waits for them.
  bool take_sent_buffers();

  /// Expects a synchronised backward. With find_unused_parameters (and in the first passes of
  /// static_graph) the graph is walked from `outputs`; given at all, they also tell which forward a
  /// backward belongs to where two forwards are followed by two backwards. Throws naming the
  /// parameters that the previous pass left without a gradient.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);
  /// To be called before a forward that will be synchronised, on every rank. The first call
  /// compares the names of the comm hooks (MismatchError, on all ranks); the one after which the
  /// ready order is known lays the buckets out in rank 0's order, once. Both are collective.
  void begin_forward();

  /// Call this before every forward that records gradients, before any other collective. Does
  /// nothing unless the last synchronised backward threw an exception. Then all ranks complete the
  /// reductions of that backward and drop its gradients: every .grad becomes undefined and the
  /// counts of weighted_backward become 0. Throws MismatchError where the backward of another rank
  /// did not throw, because the replicas have parted. Collective after an exception.
  void join_broken_backward();

  /// Replaces the reduction; before the first synchronised forward. Throws SettingsError where
  /// `hook` is null or a hook is set already.
  void register_comm_hook(std::shared_ptr<CommHook> hook);

  /// This rank's share of the weighted mean; counts add up until a synchronised backward uses them.
  void add_weight(double count);
  /// The same with one element on the device; the host does not wait.
  void add_weight(const at::Tensor& count);

  /// The counts that wait for the next synchronised backward, and their restoration after a
  /// weighted_backward whose loss has no graph to run.
  struct Counts {
    double host = 0;
    at::Tensor device;  ///< float32 [1]; undefined: none
    bool is_weighted = false;
  };
  Counts counts() const;
  void restore_counts(const Counts& counts);

  /// A forward ran whose backward is not to be reduced.
  void note_local_forward();
  /// A synchronised forward's outputs live and no backward has reached them.
  bool has_open_forward();
  /// Backwards without add_weight() throw from now on; a weighted join uses it.
  void require_weight(bool on);
  /// What the next synchronised backward divides by instead of the world size; join uses it.
  void set_divisor(double divisor);
  /// Takes part in a synchronised backward of the other ranks with zeros. Leaves other ranks' means
  /// in `.grad`: set_gradients_aside() keeps this rank's own. Collective.
  void shadow_backward();
  /// Takes `.grad` of every parameter and the counts of weighted_backward out of the reducer, and
  /// puts them back. One clone of the gradients that lie in buckets.
  struct OwnGradients;
  std::shared_ptr<const OwnGradients> set_gradients_aside();
  void restore_gradients(const OwnGradients& own);

  /// No rebuild is to come and the hooks were compared: what a backward does may be captured.
  bool is_settled() const;
  /// Why a backward can never be captured, with these settings; empty: it can.
  std::string why_not_captured() const;
  /// The host's side of a training step: weights that add up, which gradients were reduced or set
  /// aside, each parameter's .grad.
  struct HostState;
  std::shared_ptr<const HostState> host_state() const;
  /// Puts it back after a step that was begun and not run (a failed capture): no pass is open then.
  /// On the CPU reductions that began are waited for, so that every rank has to have begun them.
  void restore(const HostState& state);

  /// From now on a synchronised backward reduces on each rank only its part of every bucket, by a
  /// reduce-scatter: bucket_shard(). The rest of `.grad` is unspecified, so that adding another
  /// backward to it throws SettingsError. For one optimizer that updates those parts and sends them
  /// to the others; to be called on all ranks before the first synchronised backward. Throws
  /// SettingsError with a comm hook, and the second time.
  void shard_gradients();
  bool shards_gradients() const;

  const BucketLayout& layout() const;
  /// Called after each rebuild with the old and the new layout.
  void add_layout_listener(std::function<void(const BucketLayout&, const BucketLayout&)> listener);
  const NamedParameters& parameters() const;
  /// Flat gradients of bucket `index`: what flat optimizers read.
  at::Tensor bucket_buffer(int index) const;
  /// What of it holds the mean on this rank after a backward: all of it, or after shard_gradients()
  /// the rank-th of world_size equal parts.
  at::Tensor bucket_shard(int index) const;

  /// Time in which the compute stream (CPU: the thread) waited for reductions in the last finished
  /// backward, in milliseconds. CUDA: synchronises with that backward's end. Near 0 at world
  /// size 1.
  double exposed_communication_ms();
  void record_forward_start();
  DdpLoggingData logging_data();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ddp
