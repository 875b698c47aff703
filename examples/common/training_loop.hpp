// SPDX-License-Identifier: Apache-2.0
// Training loop of the examples. It runs epochs of optimizer steps with gradient accumulation,
// autocast, loss scaling, clipping, schedule and weight averaging. It evaluates on all ranks with
// every target counted once, and writes metrics and checkpoints. A TrainingTask defines batches and
// their loss.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "common/training_task.hpp"
#include "ddp/ddp.hpp"

namespace examples {

struct EvalResult {
  double loss = 0;
  double accuracy = 0;  ///< 0 … 1
  int64_t num_targets = 0;
};

/// Objects that the loop uses; all outlive the loop.
struct TrainingParts {
  ddp::Context& context;
  ddp::DataParallelModel& model;
  torch::nn::Module& module;  ///< inside `model`; switched between training and evaluation
  TrainingTask& task;
  ddp::Optimizer& optimizer;
  const ddp::LrSchedule& lr_schedule;
  ddp::GradScaler& scaler;
  ddp::Metrics& metrics;
  ddp::Ema* ema = nullptr;  ///< evaluations use its averages
  /// Called on all ranks after each evaluation with the steps done; the training clock is stopped.
  std::function<void(int64_t steps_done, const EvalResult&)> on_evaluation = {};
};

struct TrainingSettings {
  ddp::TrainOptions train;
  ddp::AmpOptions amp;
  int64_t num_steps = 0;          ///< optimizer steps of the whole run
  int64_t log_every = 10;         ///< gradient norm every so many steps, even without clipping
  std::string keep_best = "off";  ///< min: smallest test loss, max: largest test accuracy
};

/// Optimizer steps per epoch of `batches_per_epoch` batches; the last step may have fewer batches.
int64_t steps_per_epoch(int64_t batches_per_epoch, int64_t grad_accum_steps);

struct TrainingSummary {
  int64_t first_step = 0;        ///< > 0: the run resumed at this step
  int64_t num_steps = 0;         ///< optimizer steps in total
  ddp::EpochResult first_epoch;  ///< first epoch of this run
  ddp::EpochResult last_epoch;
  std::optional<EvalResult> test_before;  ///< result of train.eval_first
  EvalResult test;                        ///< num_targets is 0 if nothing was evaluated
  double samples_per_second = 0;          ///< all ranks, training only, without the first step
};

class TrainingLoop {
 public:
  TrainingLoop(const TrainingParts& parts, const TrainingSettings& settings);

  /// Trains from `first_step` (returned by Checkpointer::restore) to num_steps, with evaluations
  /// and checkpoints on the way and at the end. Collective. After an agreed stop it throws
  /// ddp::Stop.
  TrainingSummary run(ddp::Checkpointer& checkpointer, int64_t first_step);

  /// Loss and accuracy over the whole evaluation set, equal on all ranks. Collective; the host
  /// waits.
  EvalResult evaluate();

 private:
  /// Result of a step's lambda; logged in this order.
  struct StepOutputs {
    at::Tensor loss;
    at::Tensor num_correct;
    at::Tensor grad_norm;         ///< undefined if not wanted
    at::Tensor first_non_finite;  ///< GradientScan's result; undefined without a scan
    friend void for_each_tensor(StepOutputs& outputs, const ddp::TensorVisitor& visit) {
      visit(outputs.loss);
      visit(outputs.num_correct);
      visit(outputs.grad_norm);
      visit(outputs.first_non_finite);
    }
  };
  using Batches = std::vector<TrainingBatch>;

  ddp::GraphedStepOptions training_options() const;
  ddp::GraphedStepOptions evaluation_options() const;
  ddp::StepMetrics train_step(int64_t step);
  bool is_logged(int64_t step) const;
  bool wants_norm(int64_t step) const;
  void tell_of_non_finite_gradients(int64_t step);
  /// Runs a whole optimizer step, eager or captured. Only its arguments may differ between steps.
  /// The wish for a gradient norm selects another variant.
  StepOutputs run_step(const Batches& batches, const ddp::StepScalars& scalars);
  /// Runs forward and backward of one batch; adds its share to the step's loss and correct answers.
  void micro_step(const TrainingBatch& batch, size_t num_micro_steps, StepOutputs& outputs);
  /// Unscales, clips and updates. Outputs the gradient norm and the scan's result, if wanted.
  void update(const ddp::StepScalars& scalars, StepOutputs& outputs);
  bool is_last(int64_t step) const { return step + 1 == settings_.num_steps; }
  bool ends_epoch(int64_t step) const;
  bool evaluates_after(int64_t step) const;
  EvalResult evaluate_after(int64_t steps_done);
  void end_epoch(int64_t step, bool evaluated, TrainingSummary& summary);
  double metric_of(const EvalResult& test) const;

  TrainingParts parts_;
  TrainingSettings settings_;
  ddp::NonFiniteGuard guard_;
  EvaluationSums sums_;
  ddp::GraphedStep<Batches, StepOutputs> step_;
  ddp::GraphedStep<TrainingBatch, std::vector<at::Tensor>> evaluation_;
  ddp::StepLog last_log_;         // of the latest training step
  bool norm_is_wanted_ = false;   // in the current step
  int64_t non_finite_steps_ = 0;  // steps already reported
  int64_t batches_per_epoch_;
  int64_t steps_per_epoch_;
  bool first_epoch_ = true;
  double train_seconds_ = 0;
  double timed_samples_ = 0;
};

}  // namespace examples
