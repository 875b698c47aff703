// SPDX-License-Identifier: Apache-2.0
// Communication hooks: how a bucket of gradients is averaged over the ranks, for example in bf16.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ddp/comm/communicator.hpp"

namespace ddp {

/// What a hook sees of a bucket.
struct GradBucket {
  int index = 0;         ///< in launch order
  bool is_last = false;  ///< the last bucket of this backward
  /// Flat 1-D, the undivided gradients with padding between them. The padding is zero, or NaN after
  /// a mean that was NaN everywhere.
  at::Tensor buffer;
  at::Tensor shard;  ///< the part that this rank averages with ZeRO-1, else the whole `buffer`
  std::vector<at::Tensor> gradients;   ///< views of `buffer`, shaped like the parameters
  std::vector<at::Tensor> parameters;  ///< those of `gradients`, in this order
  double divisor = 1;                  ///< divisor of the sum over ranks: usually the world size
  /// 1 / sum(counts) on the device in weighted_backward, else undefined. If it is defined, finish()
  /// multiplies the sum by it instead of dividing by `divisor`. start() must not read it, unless
  /// CommHook::reads_count() is true.
  at::Tensor inverse_count;
  /// GradScaler's scale of this backward, one element on the device; undefined: 1. Gradients are in
  /// units of it, so a hook rescales what it keeps from an earlier backward. The scaler overwrites
  /// the tensor: keep a copy, not the tensor.
  at::Tensor loss_scale;
  Communicator* communicator = nullptr;  ///< of the model; outlives the hook's calls
};

/// One hook serves one model. start() and finish() run with autocast and gradient recording off,
/// for the buckets in the same order on every rank.
/// - start() is called as soon as the bucket's gradients are complete, perhaps on the autograd
///   engine's thread. It must not wait for a collective.
/// - finish() is called at the end of the backward. It must leave the mean in `bucket.buffer`,
///   equal on all ranks.
///
/// A hook must send tensors of equal sizes on all ranks. Otherwise values are wrong or the job
/// crashes; CommunicatorOptions::check_collectives detects this. A `bucket.buffer` of another
/// shape, dtype or device after finish() is a SettingsError.
class CommHook {
 public:
  virtual ~CommHook() = default;
  virtual std::string name() const = 0;         ///< compared across ranks
  virtual void start(GradBucket& bucket) = 0;   ///< divides, starts the sum
  virtual void finish(GradBucket& bucket) = 0;  ///< leaves the mean in `buffer`
  /// Called when the buckets change and after a backward threw. Drops all state of buckets.
  virtual void reset() {}
  /// True if start() only enqueues operations, so that buckets may share one group call.
  virtual bool starts_in_group() const { return false; }
  /// True if start() reads GradBucket::inverse_count. Each start() then waits for the sum of
  /// counts.
  virtual bool reads_count() const { return false; }
  /// Bytes sent for each byte of gradients, for ddp.bucket_cap_mb=auto.
  virtual double wire_fraction() const { return 1; }
  /// True if start() and finish() do the same in every step, so that a CUDA graph may replay them.
  virtual bool capturable() const { return true; }
};

/// Makes a hook whose start() is `start`, which divides by bucket.divisor and returns the work.
/// finish() waits for that work. In weighted_backward it then multiplies by inverse_count *
/// divisor.
std::shared_ptr<CommHook> make_function_hook(std::string name,
                                             std::function<WorkPtr(GradBucket&)> start);

}  // namespace ddp
