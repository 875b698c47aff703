// SPDX-License-Identifier: Apache-2.0
// Starts the reduction of each bucket on a stream behind its gradients, and finishes all
// reductions:
//
//   compute stream | dgrad 3 | dgrad 2 | dgrad 1 | ...            | finish: waits
//   side stream         | wgrad 3  | wgrad 2 | ...
//   launch stream                  | waits: bucket of 3 | ...
//
// Each bucket takes a plain all-reduce, or a reduce-scatter with sharded gradients. A comm hook
// replaces either.
#pragma once

#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ddp/comm/communicator.hpp"
#include "ddp/reduce/comm_hook.hpp"
#include "reduce/buckets/gradient_arena.hpp"
#include "reduce/buckets/gradient_probe.hpp"
#include "reduce/weighted_mean.hpp"

namespace ddp::detail {

class BucketReductions {
 public:
  BucketReductions(CommunicatorPtr communicator, GradientArena& gradients, WeightedMean& mean);

  const std::shared_ptr<CommHook>& hook() const { return hook_; }
  void set_hook(std::shared_ptr<CommHook> hook) { hook_ = std::move(hook); }
  /// Records the backwards from now on; nullptr: none. It outlives them.
  void set_probe(const GradientProbe* probe) { probe_ = probe; }
  /// Whether these backwards send nothing (GradientProbe).
  bool are_rehearsed() const { return is_rehearsal(probe_); }

  /// Forgets the streams and works of the previous pass. The buckets are those of the current
  /// layout.
  void begin_pass();
  /// Call when a gradient of bucket `index` is in its slot or in .grad, on the stream that computed
  /// it.
  void record_gradient(int index, const ops::GradSlot& slot);
  /// Call in the backward: buckets that start from now on have this GradBucket::loss_scale.
  void set_loss_scale(at::Tensor scale) { loss_scale_ = std::move(scale); }
  /// Makes the current stream wait for the streams on which the bucket's gradients were
  /// accumulated.
  void wait_for_gradients(int index);
  /// Starts buckets [first, last], which share one group call.
  void start(size_t first, size_t last);
  /// Waits for all reductions and leaves the means in the buckets. Waits for all even if one
  /// throws: any other reduction would write into the next step's gradients. Throws RehearsalEnd at
  /// the end of a rehearsal, which started none.
  void finish();

  /// Makes the current stream wait for reductions of a backward that an exception ended.
  void join_streams();
  /// Undoes what start() did on the host. On the CPU it waits for reductions, because they use the
  /// buckets. Captured reductions never began.
  void abandon();

 private:
  struct Reduction {
    bool is_started = false;
    WorkPtr work;                      // none with a hook
    std::vector<c10::Stream> streams;  // on which gradients were accumulated
    std::vector<c10::Stream> writers;  // on which ops wrote slots
  };

  bool record_hashes(size_t first, size_t last) const;
  c10::Stream stream_behind_gradients(size_t first, size_t last);
  void finish_bucket(size_t index);
  void copy_hook_result(GradBucket& bucket) const;
  at::Device device() const { return communicator_->device(); }

  CommunicatorPtr communicator_;
  GradientArena& gradients_;
  WeightedMean& mean_;
  std::shared_ptr<CommHook> hook_;
  const GradientProbe* probe_ = nullptr;
  at::Tensor loss_scale_;
  std::vector<Reduction> reductions_;         // by bucket
  std::optional<c10::Stream> launch_stream_;  // see stream_behind_gradients
  bool uses_launch_stream_ = false;           // in this pass
};

}  // namespace ddp::detail
