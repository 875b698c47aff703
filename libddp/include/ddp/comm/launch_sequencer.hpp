// SPDX-License-Identifier: Apache-2.0
// The agreed order in which gradient buckets of several models are launched on one communicator.
//
// Autograd hooks fire in an order that may differ between ranks, but every rank must launch the
// same collectives in the same order. Inside one model buckets launch strictly as 0, 1, 2, …
// Between models the order comes from the forwards, which every rank runs alike: the model whose
// forward ran last goes first, because backward reaches it first. A model behind it in the order
// keeps its ready buckets until the ones before it have launched everything, or until the backward
// that made them ready ends (flush): models that take no part in that backward then stand aside.
// What must happen at the end of a backward (some comm hooks reduce a second time there) runs in
// the same order.
//
// Torch-free. Any thread; launches run under the sequencer's lock, so they never interleave.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

namespace ddp {

class LaunchSequencer {
 public:
  using ModelId = int64_t;

  /// Model instances are numbered in construction order, alike on all ranks.
  ModelId register_model();

  /// A synchronised backward of `model` with `num_buckets` buckets is expected; moves the model to
  /// the front of the order. `launch(bucket)` is called once a bucket, `finish()` once at the end.
  void begin_pass(ModelId model, int num_buckets, std::function<void(int)> launch,
                  std::function<void()> finish);

  /// Bucket `bucket` of the running pass holds its gradients: launches what the order allows.
  void bucket_ready(ModelId model, int bucket);

  /// The backward ended: launches, then finishes and forgets, every pass whose buckets are all
  /// ready, in order. `finish` runs without the lock and may begin the next pass.
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
