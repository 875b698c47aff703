// SPDX-License-Identifier: Apache-2.0
// The training loop that the image examples share: epochs of optimizer steps with gradient
// accumulation, autocast, loss scaling, clipping, schedule, mixup and weight averaging; evaluation
// on all ranks with every sample counted once; metrics and checkpoints.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>

#include "ddp/ddp.hpp"

namespace examples {

/// What the loop drives; all of it outlives the loop.
struct TrainingParts {
  const ddp::Context& context;
  ddp::DataParallelModel& model;
  torch::nn::Module& module;  ///< inside `model`: switched between training and evaluation
  std::function<torch::Tensor(const torch::Tensor&)> forward;  ///< the wrapper's
  ddp::Optimizer& optimizer;
  const ddp::LrSchedule& lr_schedule;
  ddp::GradScaler& scaler;
  ddp::DataLoader<>& train_loader;
  ddp::DataLoader<>& eval_loader;  ///< unpadded: each sample on one rank
  ddp::Metrics& metrics;
  ddp::Ema* ema = nullptr;  ///< its averages are what is evaluated
};

struct TrainingSettings {
  ddp::TrainOptions train;
  ddp::AmpOptions amp;
  int64_t num_steps = 0;   ///< optimizer steps of the whole run
  int64_t log_every = 10;  ///< steps whose gradient norm is wanted even without clipping
  int64_t seed = 0;        ///< of mixup
  bool weighted = false;   ///< ranks' batches differ in size: take the mean over samples, not ranks
  std::string keep_best = "off";  ///< CheckpointOptions::keep_best; min: of the test loss, max: of
                                  ///< the test accuracy
};

/// Optimizer steps an epoch of `batches_per_epoch` batches takes; the last one may have fewer
/// batches.
int64_t steps_per_epoch(int64_t batches_per_epoch, int64_t grad_accum_steps);

struct EvalResult {
  double loss = 0;
  double accuracy = 0;  ///< 0 … 1
  int64_t num_samples = 0;
};

struct TrainingSummary {
  int64_t first_step = 0;        ///< > 0: resumed there
  int64_t num_steps = 0;         ///< optimizer steps taken in all
  ddp::EpochResult first_epoch;  ///< of this run
  ddp::EpochResult last_epoch;
  EvalResult test;               ///< num_samples is 0 where nothing was evaluated
  double images_per_second = 0;  ///< all ranks, training alone, without the first step
};

/// One run.
class TrainingLoop {
 public:
  /// Throws SettingsError for train.mixup beyond kMaxMixupAlpha.
  TrainingLoop(const TrainingParts& parts, const TrainingSettings& settings);

  /// Trains from `first_step` (what Checkpointer::restore gave) to num_steps, evaluating and saving
  /// on the way and at the end. Collective. ddp::Stop passes through after an agreed stop.
  TrainingSummary run(ddp::Checkpointer& checkpointer, int64_t first_step);

  /// Loss and accuracy over the whole evaluation set, equal on all ranks. Collective; the host
  /// waits.
  EvalResult evaluate();

 private:
  ddp::StepMetrics train_step(int64_t step);
  /// Forward and backward of one batch; adds its share to the step's loss and right answers.
  void micro_step(const ddp::Batch& batch, int64_t draw, int64_t num_micro_steps,
                  ddp::StepMetrics& metrics);
  /// True where it evaluated.
  bool end_epoch(int64_t step, TrainingSummary& summary);
  double metric_of(const EvalResult& test) const;

  TrainingParts parts_;
  TrainingSettings settings_;
  int64_t batches_per_epoch_;
  int64_t steps_per_epoch_;
  bool first_epoch_ = true;
  double train_seconds_ = 0;
  double timed_images_ = 0;
};

}  // namespace examples
