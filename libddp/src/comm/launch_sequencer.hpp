// SPDX-License-Identifier: Apache-2.0
// The agreed order in which gradient buckets of several models are launched on one communicator.
//
// Autograd hooks may fire in different orders on different ranks, but every rank must launch the
// same collectives in the same order. Buckets of one model launch strictly as 0, 1, 2, … The order
// between models comes from the forwards, which run in the same order on every rank. The model
// whose forward ran last goes first, because backward reaches it first. A later model holds its
// ready buckets until the earlier ones have launched everything or the backward ends (flush).
// The flush skips models that do not take part in that backward. Work at the end of a backward
// (some comm hooks reduce a second time) runs in the same order.
//
// Torch-free. Any thread. Launches run under the sequencer's lock, so they never interleave.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

namespace ddp {

class LaunchSequencer {
 public:
  using ModelId = int64_t;

  /// Model instances are numbered in construction order, which is the same on all ranks.
  ModelId register_model();

  /// Announces a synchronised backward of `model` with `num_buckets` buckets and moves the model to
  /// the front of the order. Calls `launch(bucket)` once per bucket and `finish()` once at the end.
  void begin_pass(ModelId model, int num_buckets, std::function<void(int)> launch,
                  std::function<void()> finish);

  /// Bucket `bucket` of the running pass has its gradients. Launches all buckets that the order
  /// allows.
  void bucket_ready(ModelId model, int bucket);

  /// Call at the end of a backward. Launches, finishes and forgets every pass whose buckets are all
  /// ready, in order. `finish` runs without the lock and may begin the next pass. If one throws,
  /// the others still run, and then the first exception is passed on.
  void flush();

  /// Forgets the pass of `model`, launched or not.
  void end_pass(ModelId model);

 private:
  struct Pass {
    ModelId model;
    std::vector<bool> ready;
    int num_ready = 0;
    int num_launched = 0;
    std::function<void(int)> launch;
    std::function<void()> finish;
    bool complete() const { return num_ready == static_cast<int>(ready.size()); }
    bool done() const { return num_launched == static_cast<int>(ready.size()); }
  };

  void launch_in_order(Pass& pass);

  std::mutex mutex_;
  ModelId next_model_ = 0;
  std::vector<Pass> passes_;  // front first
};

}  // namespace ddp
