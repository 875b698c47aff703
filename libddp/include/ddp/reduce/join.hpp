// SPDX-License-Identifier: Apache-2.0
// Uneven inputs: ranks that run out of batches join the others' reductions with zeros.
//
//   ddp::join(model, [&] {
//     for (auto& batch : my_batches) { … forward, backward, step … }
//   });
//
// Every forward inside costs one small all-gather that the host waits for. Each synchronised
// forward needs its backward before the next forward (else SettingsError).
//
// A training loop with Metrics, a Checkpointer or an optimizer with state uses the second form, in
// which every rank makes every step. examples/recipes/uneven_data.cpp is such a program.
#pragma once

#include <functional>

#include "ddp/reduce/data_parallel_model.hpp"

namespace ddp {

struct JoinOptions {
  /// False: gradients are divided by the number of ranks that still have input.
  bool divide_by_initial_world_size = true;
  /// True: as soon as one rank runs out, all ranks throw MismatchError.
  bool throw_on_early_termination = false;
  /// True if the loop calls weighted_backward: ranks without input add a count of 0, and the
  /// divisor is the sum of counts. Throws SettingsError if the loop calls loss.backward() instead.
  bool weighted = false;
};

/// Runs `loop` on every rank until all have run out. Collective. A rank that ran out makes no more
/// optimizer steps and gets only parameters and buffers at the end. With momentum, Adam or a
/// GradScaler use the overload below. Throws SettingsError with SyncBatchNorm (collective forward)
/// and with optimizer.zero1. On several ranks it also throws if `loop` calls what all ranks must
/// call, such as Metrics, Checkpointer or collectives with gradients. The overload below takes such
/// calls. So does throw_on_early_termination, between a backward and the next forward.
void join(DataParallelModel& model, const std::function<void()>& loop,
          const JoinOptions& options = {});

/// All ranks make all steps, so `step` may call Metrics and Checkpointer, and forwards may be
/// collective. Collective. Calls step(true) while has_batch() is true, then step(false) until no
/// rank has a batch. In step(false) run the same forward and backward on an empty batch, with
/// weighted_backward(loss_sum, 0), and give Metrics 0 samples. A module that refuses an empty batch
/// gets any sample there, with a loss_sum that is multiplied by 0.
void join(DataParallelModel& model, const std::function<void(bool)>& step,
          const std::function<bool()>& has_batch);

}  // namespace ddp
