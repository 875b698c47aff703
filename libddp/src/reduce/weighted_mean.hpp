// SPDX-License-Identifier: Apache-2.0
// The divisor of the sum of the ranks' gradients: the world size, the divisor of a join, or in
// weighted_backward the sum of the ranks' counts.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>

#include "ddp/comm/communicator.hpp"
#include "reduce/buckets/gradient_arena.hpp"

namespace ddp::detail {

class WeightedMean {
 public:
  /// The counts that wait for the next synchronised backward, and the kind of the gradients that
  /// wait for it. All are of one kind, because one number divides their sum.
  struct Counts {
    double host = 0;
    at::Tensor device;  ///< [1], never the caller's tensor; undefined: none
    bool is_weighted = false;
    bool is_plain = false;  ///< gradients of backward() under no_sync() wait instead

    bool is_none() const { return !is_weighted && !is_plain; }
    bool empty() const { return host == 0 && !device.defined(); }
  };

  WeightedMean(CommunicatorPtr communicator, GradientArena& gradients);

  /// Adds to this rank's count. Counts add up until a synchronised backward uses them. Throws
  /// SettingsError if gradients of backward() wait.
  void add(double count);
  /// The same with one element on the device. The host does not wait.
  void add(const at::Tensor& count);
  const Counts& counts() const { return counts_; }
  void set_counts(const Counts& counts) { counts_ = counts; }
  /// Undoes an add(). `before` are the counts from before it.
  void undo_add(const Counts& before);
  /// Whether the backward that runs belongs to the counts.
  void set_runs_weighted(bool on) { runs_weighted_ = on; }
  /// Call for a gradient of another model's backward, which shares the parameter. Throws
  /// SettingsError if counts of another backward wait.
  void check_gradient() const;
  /// The same for a gradient of this model's backward.
  void record_gradient(bool is_reduced);
  /// Replaces the world size as the divisor; 0 restores it.
  void set_divisor(double divisor) { divisor_ = divisor; }
  bool has_own_divisor() const { return divisor_ != 0; }
  /// Call before a backward adds its first gradient. If the divisor is or may become another one
  /// than the world size, means of earlier backwards move out of the buckets. Throws SettingsError
  /// if gradients of backward() under no_sync() were added to them.
  void begin_backward();
  /// From now on backwards without a count throw. A weighted join uses this.
  void require_counts(bool on) { requires_counts_ = on; }
  /// Set it inside a join: each forward then has exactly one backward.
  void set_in_join(bool on) { in_join_ = on; }
  bool in_join() const { return in_join_; }

  /// Whether the collective sums and scale() divides. Otherwise the collective averages.
  bool scales_after_sum() const;
  ReduceOp reduce_op() const { return scales_after_sum() ? ReduceOp::Sum : ReduceOp::Avg; }
  /// Throws SettingsError if counts are required and there are none.
  void check_counts() const;
  /// Starts the sum of the counts over the ranks. Does nothing without counts. Collective.
  void start();
  /// Sets the divisor that the bucket's comm hook uses.
  void set_bucket_divisor(GradBucket& bucket) const;
  /// Makes the current stream (on the CPU: the host) wait for the sum of the counts.
  void finish();
  /// Turns the sum in the bucket's shard into the mean.
  void scale(const GradBucket& bucket) const;
  /// Turns a sum of the ranks' gradients, which no collective divided, into the mean.
  void divide(const at::Tensor& sum) const;
  /// Call when the backward that used the counts ended, or when their gradients were dropped.
  void reset() { counts_ = {}; }
  /// Drops a sum that start() began.
  void abandon() {
    work_ = nullptr;
    finished_stream_ = std::nullopt;
  }

 private:
  double divisor() const { return has_own_divisor() ? divisor_ : communicator_->world_size(); }

  CommunicatorPtr communicator_;
  GradientArena& gradients_;
  Counts counts_;
  std::optional<c10::Stream> device_stream_;    // where counts_.device was computed
  std::optional<c10::Stream> finished_stream_;  // where the reciprocal was computed
  double divisor_ = 0;
  bool requires_counts_ = false;
  bool in_join_ = false;
  bool runs_weighted_ = false;
  /// [1] on the device: the sum, and from finish() on its reciprocal. float64 if a gradient is
  /// float64, else float32.
  at::Tensor sum_;
  WorkPtr work_;
};

}  // namespace ddp::detail
