// SPDX-License-Identifier: Apache-2.0
// The training loop that the image examples share: epochs of optimizer steps with gradient
// accumulation, autocast, loss scaling, clipping, schedule, mixup and weight averaging; evaluation on
// all ranks with every sample counted once; metrics and checkpoints.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>

#include "common/recipe.hpp"
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
  ddp::DataLoader& train_loader;
  ddp::DataLoader& eval_loader;  ///< unpadded: each sample on one rank
  ddp::Metrics& metrics;
  ddp::Ema* ema = nullptr;  ///< its averages are what is evaluated
};

struct TrainingSettings {
  RecipeOptions recipe;
  ddp::AmpOptions amp;
  double max_grad_norm = 0;  ///< 0: no clipping, the norm is not computed
  int64_t max_steps = 0;     ///< optimizer steps
  int64_t seed = 0;          ///< of mixup
};

/// Optimizer steps an epoch of `batches_per_epoch` batches takes; the last one may have fewer batches.
int64_t steps_per_epoch(int64_t batches_per_epoch, int64_t grad_accum_steps);

struct EvalResult {
  double loss = 0;
  double accuracy = 0;  ///< 0 … 1
  int64_t num_samples = 0;
};

struct TrainingSummary {
  int64_t first_step = 0;  ///< > 0: resumed there
  int64_t steps = 0;       ///< optimizer steps taken in all
  double first_loss = 0;   ///< of the first and the last epoch of this run, all ranks
  double last_loss = 0;
  EvalResult test;
  double images_per_second = 0;  ///< all ranks, training alone, the first step left out
};

/// One run. As a Stateful it keeps the running epoch's sums, so that a resumed epoch reports the same
/// loss and accuracy.
class TrainingLoop : public ddp::Stateful {
 public:
  TrainingLoop(const TrainingParts& parts, const TrainingSettings& settings);

  /// Trains from `first_step` (what Checkpointer::restore gave) to max_steps, evaluating and saving on
  /// the way. Collective. ddp::Stop passes through after an agreed stop.
  TrainingSummary run(ddp::Checkpointer& checkpointer, int64_t first_step);

  /// Loss and accuracy over the whole evaluation set, equal on all ranks. Collective.
  EvalResult evaluate();

  std::string state_name() const override { return "training_loop"; }
  ddp::StateDict state_dict() const override;
  void load_state_dict(const ddp::StateDict& state) override;

 private:
  struct StepResult {
    torch::Tensor loss;  ///< mean over this rank's samples of the step
    torch::Tensor grad_norm;
    int64_t num_samples = 0;  ///< this rank's
    double lr = 0;
  };

  StepResult train_step(int64_t step);
  torch::Tensor micro_step(int64_t draw, int64_t num_micro_steps, StepResult& result);
  void end_epoch(int64_t step, TrainingSummary& summary);
  EvalResult reduce(const torch::Tensor& sums);

  TrainingParts parts_;
  TrainingSettings settings_;
  int64_t batches_per_epoch_;
  int64_t steps_per_epoch_;
  bool ragged_;         // ranks' batches differ in size: the mean is weighted
  torch::Tensor sums_;  // [3] float64: loss * samples, hits, samples of the running epoch, this rank
  bool loss_seen_ = false;
  double train_seconds_ = 0;
  int64_t timed_images_ = 0;
};

}  // namespace examples
