// SPDX-License-Identifier: Apache-2.0
// Uneven inputs: ranks that run out of batches take part in the others' reductions with zeros.
//
//   ddp::join(model, [&] {
//     for (auto& batch : my_batches) { … forward, backward, step … }
//   });
//
// Every forward inside costs one small all-gather that the host waits for, and a synchronised one
// has its backward before the next: SettingsError otherwise.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "ddp/reduce/data_parallel_model.hpp"

namespace ddp {

struct JoinOptions {
  /// True: gradients are divided by the world size, as if joined ranks had zero gradients. False:
  /// by the number of ranks that still have input.
  bool divide_by_initial_world_size = true;
  /// True: as soon as one rank runs out, all ranks throw MismatchError.
  bool throw_on_early_termination = false;
  /// The loop calls weighted_backward: joined ranks add weight 0 and the divisor is the sum of
  /// weights. Has to agree with what the loop does: throws SettingsError otherwise.
  bool weighted = false;
};

/// Announces forwards while it lives and shadows them afterwards; use join().
class JoinScope {
 public:
  JoinScope(DataParallelModel& model, const JoinOptions& options);
  ~JoinScope();
  JoinScope(const JoinScope&) = delete;
  JoinScope& operator=(const JoinScope&) = delete;

  /// This rank is about to run a forward. Collective with the other ranks' announcements or
  /// shadows.
  void announce_forward(bool synchronised, bool sends_buffers);
  /// The rank whose buffers count: the highest that still has input.
  int buffer_root() const { return highest_active_; }
  bool is_weighted() const { return options_.weighted; }
  /// This rank ran out: takes part with zeros until all have; then the rank that was active last
  /// (the highest of them) sends its model to all. Collective.
  void finish();

 private:
  std::vector<int64_t> exchange(int64_t flags);
  void apply(const std::vector<int64_t>& flags);

  DataParallelModel& model_;
  JoinOptions options_;
  int highest_active_ = 0;
  bool uneven_ = false;  // a rank ran out before another
};

/// Runs `loop` on every rank until all have run out. Collective. Throws SettingsError for a model
/// with SyncBatchNorm, whose forward is collective itself: use the second form.
void join(DataParallelModel& model, const std::function<void()>& loop,
          const JoinOptions& options = {});

/// Calls step(true) while has_batch() and step(false) on ranks that ran out, until none has a
/// batch: step(false) runs the same forward and backward with an empty share (weighted_backward
/// with count 0). For models with collectives in their forward. Collective.
void join(DataParallelModel& model, const std::function<void(bool)>& step,
          const std::function<bool()>& has_batch);

}  // namespace ddp
