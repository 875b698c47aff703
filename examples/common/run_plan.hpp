// SPDX-License-Identifier: Apache-2.0
// What a run's settings mean before its first step: the length of the run and its epochs, the steps
// that evaluate and log.
#pragma once

#include <cstdint>

#include "ddp/comm/context.hpp"
#include "ddp/core/control_plane.hpp"
#include "ddp/data/dataset.hpp"
#include "ddp/train/config.hpp"

namespace examples {

/// Returns the optimizer steps of a run whose ranks have `batches_per_epoch` batches each; compares
/// this number between ranks (collective). Returns 0 with checkpoint.resume=best, which evaluates
/// only. Fills in the length of the learning rate schedule if unset. A resume must have the same
/// samples per step, because steps decide evaluations, learning rates and the end of the run.
int64_t plan_run(ddp::Config& cfg, const ddp::Context& ctx, int64_t batches_per_epoch);

/// Options of a Checkpointer that only reads a folder in which a run may still be saving: the
/// newest checkpoint, or the best one with checkpoint.resume=best; an error without one.
ddp::CheckpointOptions reading_options(ddp::CheckpointOptions options);

/// Options of a loader for an evaluation set: all samples, batches of train.eval_batch_size.
ddp::LoaderOptions eval_loader_options(const ddp::Config& cfg);

/// Optimizer steps per epoch of `batches_per_epoch` batches; the last step may have fewer batches.
int64_t steps_per_epoch(int64_t batches_per_epoch, int64_t grad_accum_steps);

/// The steps of a run: which batches they take, and which of them log, evaluate or end an epoch.
class StepSchedule {
 public:
  /// `log_every` 0: no step logs.
  StepSchedule(const ddp::TrainOptions& train, int64_t batches_per_epoch, int64_t num_steps,
               int64_t log_every);

  int64_t steps_per_epoch() const { return steps_per_epoch_; }
  int64_t epoch_of(int64_t step) const { return step / steps_per_epoch_; }
  /// Batches that the step accumulates. An epoch's last step takes the remaining ones.
  int64_t num_batches(int64_t step) const;
  bool is_last(int64_t step) const { return step + 1 == num_steps_; }
  bool is_logged(int64_t step) const;
  bool ends_epoch(int64_t step) const;
  bool evaluates_after(int64_t step) const;

 private:
  int64_t first_batch(int64_t step) const;

  int64_t grad_accum_steps_;
  int64_t eval_every_, eval_every_steps_;
  int64_t batches_per_epoch_;
  int64_t steps_per_epoch_;
  int64_t num_steps_;
  int64_t log_every_;
};

/// Ends a run that was asked to stop before or after its training steps: throws ddp::Stop, so that
/// a restart repeats `work`. If that would train again, because training has no checkpoints, throws
/// Error. `who` is StopPoll::stop_reason().
[[noreturn]] void stop_beside_training(const ddp::Config& cfg, const std::string& who,
                                       const std::string& work);

/// Throws SettingsError on all ranks if their numbers of batches per epoch differ: ranks with more
/// batches would wait for the others in the middle of a step. Collective.
void require_equal_batches(int64_t batches_per_epoch, ddp::ControlPlane& control_plane);

/// Throws DataError if both splits have class names and the names differ: the test figures would be
/// meaningless.
void require_same_classes(const ddp::Dataset& train, const ddp::Dataset& test);

}  // namespace examples
