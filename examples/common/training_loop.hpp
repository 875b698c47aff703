// SPDX-License-Identifier: Apache-2.0
// Training loop of the examples. run() trains with evaluations and checkpoints on the way, and
// run_step() is one optimizer step. A TrainingTask defines the batches and their loss.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/evaluation.hpp"
#include "common/evaluation_scope.hpp"
#include "common/run_plan.hpp"
#include "common/training_report.hpp"
#include "common/training_task.hpp"
#include "ddp/ddp.hpp"

namespace examples {

/// Objects that the loop uses; all outlive the loop.
struct TrainingParts {
  ddp::Context& context;
  ddp::DataParallelModel& model;
  torch::nn::Module& module;  ///< inside `model`; switched between training and evaluation
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
  double stop_check_seconds = 1;  ///< between checks for a stop in an evaluation
  /// Min uses the test loss, Max the test accuracy.
  ddp::KeepBest keep_best = ddp::KeepBest::Off;
};

/// Input of one optimizer step. `wants_grad_norm` is part of it, so that steps with and without a
/// norm get separate graphs.
template <TrainingBatch Batch>
struct StepInput {
  std::vector<Batch> batches;  ///< accumulated in this order
  bool wants_grad_norm = false;
};
template <TrainingBatch Batch>
void for_each_tensor(StepInput<Batch>& input, const ddp::TensorVisitor& visit) {
  for (Batch& batch : input.batches) {
    for_each_tensor(batch, visit);
  }
  visit(input.batches.size());
  visit(input.wants_grad_norm);
}

/// Thrown on all ranks after an agreed stop during an evaluation, which changes no training state.
struct EvaluationStopped : ddp::Stop {
  explicit EvaluationStopped(const std::string& who_in)
      : Stop(who_in + ": stopped during an evaluation"), who(who_in) {}
  std::string who;  ///< StopPoll::stop_reason()
};

/// What one optimizer step returns.
struct StepOutputs {
  at::Tensor loss;  ///< this rank's mean
  at::Tensor num_correct;
  at::Tensor grad_norm;         ///< undefined if not wanted
  at::Tensor first_non_finite;  ///< GradientScan's result; undefined without a scan
};
inline void for_each_tensor(StepOutputs& outputs, const ddp::TensorVisitor& visit) {
  visit(outputs.loss);
  visit(outputs.num_correct);
  visit(outputs.grad_norm);
  visit(outputs.first_non_finite);
}

template <TrainingBatch Batch>
class TrainingLoop {
 public:
  /// `task` outlives the loop.
  TrainingLoop(TrainingTask<Batch>& task, const TrainingParts& parts,
               const TrainingSettings& settings);

  /// Trains from `first_step` (returned by Checkpointer::restore) to num_steps, with evaluations
  /// and checkpoints on the way and at the end. Collective. After an agreed stop it throws
  /// ddp::Stop. An evaluation that was stopped is repeated by the resumed run.
  TrainingSummary run(ddp::Checkpointer& checkpointer, int64_t first_step);

  /// Loss and accuracy over the whole evaluation set, equal on all ranks: of the averages of
  /// weights and buffers if there are any, else of the model. Collective; the host waits. Throws
  /// EvaluationStopped.
  EvalResult evaluate();

 private:
  void train_step(int64_t step);
  /// A whole optimizer step, eager or captured. Only its arguments may differ between steps.
  StepOutputs run_step(const StepInput<Batch>& input, const ddp::StepScalars& scalars);
  /// Adds the batch's gradients. The result's loss is the batch's share of the step's loss.
  /// `num_targets` counts all batches of the step; it is used with means.
  BatchResult forward_backward(const Batch& batch, int64_t num_targets);
  bool wants_grad_norm(int64_t step) const {
    return settings_.train.max_grad_norm > 0 || guard_.skips() || schedule_.is_logged(step);
  }

  EvalResult evaluate_after(int64_t steps_done, bool is_repeated = false);
  /// Repeats the evaluation in which the run of the checkpoint was stopped, if any.
  std::optional<EvalResult> finish_evaluation(ddp::Checkpointer& checkpointer, int64_t first_step);
  [[noreturn]] void stop_in_evaluation(ddp::Checkpointer& checkpointer, int64_t steps_done,
                                       const std::string& who);
  void end_epoch(int64_t step, bool evaluated, TrainingSummary& summary);
  double metric_of(const EvalResult& test) const {
    return settings_.keep_best == ddp::KeepBest::Min ? test.loss : test.accuracy;
  }

  TrainingTask<Batch>& task_;
  TrainingParts parts_;
  TrainingSettings settings_;
  StepSchedule schedule_;
  ddp::NonFiniteGuard guard_;
  NonFiniteLog non_finite_log_;
  EvaluationSums sums_;
  ddp::GraphedStep<StepInput<Batch>, StepOutputs> step_;
  ddp::GraphedStep<Batch, std::vector<at::Tensor>> evaluation_;
  ddp::LoggedScalar last_loss_;  // of the latest training step
};

template <TrainingBatch Batch>
TrainingLoop<Batch>::TrainingLoop(TrainingTask<Batch>& task, const TrainingParts& parts,
                                  const TrainingSettings& settings)
    : task_(task),
      parts_(parts),
      settings_(settings),
      schedule_(settings.train, task.num_batches(), settings.num_steps, settings.log_every),
      guard_(parts.context, settings.train.non_finite, parts.optimizer, parts.scaler),
      non_finite_log_(parts.optimizer, settings.train, parts.scaler.is_enabled()),
      sums_(parts.context.device()),
      step_(
          parts_.context,
          {.models = {&parts_.model}, .optimizers = {&parts_.optimizer}, .scaler = &parts_.scaler},
          [this](const StepInput<Batch>& input, const ddp::StepScalars& scalars) {
            return run_step(input, scalars);
          },
          {.mode = settings.train.cuda_graph,
           .replay_check_every = settings.train.replay_check_every}),
      evaluation_(
          parts_.context, {.models = {&parts_.model}},
          [this](const Batch& batch, const ddp::StepScalars&) {
            ddp::Autocast autocast(settings_.amp);
            sums_.add(task_.evaluate(batch));
            return std::vector<at::Tensor>{};
          },
          {.mode = settings.train.cuda_graph, .name = "the evaluation step"}, step_.pool()) {}

template <TrainingBatch Batch>
TrainingSummary TrainingLoop<Batch>::run(ddp::Checkpointer& checkpointer, int64_t first_step) {
  TrainingSummary summary;
  summary.first_step = first_step;
  summary.num_steps = settings_.num_steps;
  parts_.module.train();
  parts_.metrics.begin(first_step, settings_.num_steps, schedule_.steps_per_epoch());
  const auto finished = finish_evaluation(checkpointer, first_step);
  if (first_step >= settings_.num_steps) {
    checkpointer.wait();
    summary.test = finished ? *finished : evaluate();  // nothing left to train
    return summary;
  }
  checkpointer.set_before_save([this] { return guard_.before_save(); });
  int64_t steps_done = first_step;
  try {
    if (settings_.train.eval_first && first_step == 0) {
      summary.test_before = evaluate_after(0);
    }
    while (steps_done < settings_.num_steps) {
      const int64_t step = steps_done++;
      train_step(step);
      const bool evaluated = schedule_.evaluates_after(step);
      if (evaluated) {
        summary.test = evaluate_after(steps_done);
      }
      if (schedule_.ends_epoch(step)) {
        end_epoch(step, evaluated, summary);
      }
      if (schedule_.is_last(step) || (evaluated && settings_.keep_best != ddp::KeepBest::Off)) {
        checkpointer.save(step, evaluated ? std::optional(metric_of(summary.test)) : std::nullopt);
      }
      checkpointer.save_if_due(step);
    }
  } catch (const EvaluationStopped& stop) {
    if (steps_done > 0 && schedule_.ends_epoch(steps_done - 1)) {
      end_epoch(steps_done - 1, /*evaluated=*/false, summary);
    }
    stop_in_evaluation(checkpointer, steps_done, stop.who);
  }
  checkpointer.wait();               // throws if the last save failed, instead of a summary
  checkpointer.set_before_save({});  // the checkpointer may outlive the loop
  guard_.check_weights();
  return summary;
}

// The key of a checkpoint's text: the steps after which the run was stopped in an evaluation.
inline constexpr const char* kStoppedEvaluation = "stopped_evaluation";

template <TrainingBatch Batch>
void TrainingLoop<Batch>::stop_in_evaluation(ddp::Checkpointer& checkpointer, int64_t steps_done,
                                             const std::string& who) {
  checkpointer.set_text(kStoppedEvaluation, std::to_string(steps_done));
  checkpointer.stop(steps_done - 1, who);
}

template <TrainingBatch Batch>
std::optional<EvalResult> TrainingLoop<Batch>::finish_evaluation(ddp::Checkpointer& checkpointer,
                                                                 int64_t first_step) {
  if (first_step == 0 || checkpointer.text(kStoppedEvaluation) != std::to_string(first_step)) {
    return std::nullopt;
  }
  if (parts_.context.is_main()) {
    ddp::log_info(
        ddp::concat("the evaluation after step ", first_step, " was stopped, so it is repeated"));
  }
  const auto test = evaluate_after(first_step, /*is_repeated=*/true);
  checkpointer.set_text(kStoppedEvaluation, "");
  if (settings_.keep_best != ddp::KeepBest::Off) {
    checkpointer.save(first_step - 1, metric_of(test));
  }
  return test;
}

template <TrainingBatch Batch>
void TrainingLoop<Batch>::train_step(int64_t step) {
  const double lr = parts_.lr_schedule.at(step);
  StepInput<Batch> input{.batches = {}, .wants_grad_norm = wants_grad_norm(step)};
  int64_t num_samples = 0;
  int64_t num_targets = 0;
  for (int64_t i = 0; i < schedule_.num_batches(step); ++i) {
    const auto& batch =
        input.batches.emplace_back(task_.load(step * settings_.train.grad_accum_steps + i));
    num_samples += batch.num_samples();
    num_targets += batch.num_targets();
  }
  const auto result = step_(std::move(input), {.lr = lr, .step = step});
  const auto& outputs = result.outputs;
  last_loss_ = result.logged(outputs.loss);
  parts_.metrics.end_step(step, {.loss = last_loss_,
                                 .num_samples = num_samples,
                                 .lr = lr,
                                 .grad_norm = result.logged(outputs.grad_norm),
                                 .num_correct = result.logged(outputs.num_correct),
                                 .num_targets = num_targets});
  guard_.end_step(
      step, {.loss = last_loss_, .first_non_finite = result.logged(outputs.first_non_finite)});
  if (schedule_.is_logged(step) || schedule_.is_last(step)) {
    guard_.check_steps();
    if (parts_.context.is_main()) {
      non_finite_log_.report(step + 1);
    }
  }
}

template <TrainingBatch Batch>
StepOutputs TrainingLoop<Batch>::run_step(const StepInput<Batch>& input,
                                          const ddp::StepScalars& scalars) {
  StepOutputs outputs;
  TargetCount num_targets;
  int64_t num_host_targets = 0;
  for (const Batch& batch : input.batches) {
    num_host_targets += batch.num_targets();
  }
  const auto add = [](at::Tensor& sum, const at::Tensor& value) {
    sum = sum.defined() ? sum + value : value;  // both undefined: a task without accuracy
  };
  parts_.model.zero_grad();
  for (const Batch& batch : input.batches) {
    std::optional<ddp::NoSync> no_sync;
    if (&batch != &input.batches.back()) {
      no_sync.emplace(parts_.model);  // only the last backward averages over the ranks
    }
    const auto result = forward_backward(batch, num_host_targets);
    add(outputs.loss, result.loss);
    add(outputs.num_correct, result.num_correct);
    num_targets += result.num_targets;
  }
  if (task_.loss_is_sum()) {
    outputs.loss = num_targets.mean_of(outputs.loss);
  }
  if (input.wants_grad_norm) {
    const auto scan = parts_.scaler.clip_and_step(parts_.optimizer, scalars,
                                                  settings_.train.max_grad_norm, guard_.skips());
    outputs.grad_norm = scan.norm;
    outputs.first_non_finite = scan.first_non_finite;
  } else {
    parts_.scaler.step(parts_.optimizer, scalars);
  }
  parts_.scaler.update();
  if (parts_.ema != nullptr) {
    parts_.ema->update();
  }
  return outputs;
}

template <TrainingBatch Batch>
BatchResult TrainingLoop<Batch>::forward_backward(const Batch& batch, int64_t num_targets) {
  BatchResult result;
  {
    ddp::Autocast autocast(settings_.amp);
    result = task_.forward(batch);
  }
  if (task_.loss_is_sum()) {
    const double weight = task_.target_weight();
    const auto scaled = parts_.scaler.scale(guard_.watch(result.loss * weight));
    const auto& [on_host, on_device] = result.num_targets;
    if (on_device.defined()) {
      parts_.model.weighted_backward(scaled, on_device * weight);
    } else {
      parts_.model.weighted_backward(scaled, static_cast<double>(on_host) * weight);
    }
  } else {
    // The quotient is the number of batches if they have one size.
    if (num_targets > batch.num_targets()) {
      result.loss = result.loss /
                    (static_cast<double>(num_targets) / static_cast<double>(batch.num_targets()));
    }
    parts_.scaler.scale(guard_.watch(result.loss)).backward();
  }
  result.loss = result.loss.detach();
  return result;
}

template <TrainingBatch Batch>
EvalResult TrainingLoop<Batch>::evaluate() {
  if (last_loss_.has_value()) {
    // Waits for the last step, so that an error on another rank is reported here.
    last_loss_.value();
  }
  const EvaluationScope scope(parts_.model, parts_.module, parts_.ema, settings_.amp);
  sums_.clear();
  ddp::StopPoll poll(parts_.context, settings_.stop_check_seconds, "evaluation");
  task_.for_each_evaluation_batch([&](Batch batch) {
    evaluation_(std::move(batch), {});
    return !poll.should_stop();
  });
  if (poll.finish()) {
    throw EvaluationStopped(poll.stop_reason());
  }
  return sums_.reduce(*parts_.context.communicator());
}

template <TrainingBatch Batch>
EvalResult TrainingLoop<Batch>::evaluate_after(int64_t steps_done, bool is_repeated) {
  ddp::Metrics::ClockPause pause(parts_.metrics);
  const auto test = evaluate();
  // The epoch's row of a repeated evaluation was written before the stop.
  if (settings_.train.eval_every_steps > 0 || steps_done == 0 || is_repeated) {
    parts_.metrics.add_evaluation(steps_done - 1, epoch_metrics(test));
  }
  if (parts_.on_evaluation) {
    parts_.on_evaluation(steps_done, test);
  }
  return test;
}

template <TrainingBatch Batch>
void TrainingLoop<Batch>::end_epoch(int64_t step, bool evaluated, TrainingSummary& summary) {
  ddp::EpochMetrics metrics;
  if (evaluated) {
    metrics = epoch_metrics(summary.test);
  }
  summary.add_epoch(parts_.metrics.end_epoch(schedule_.epoch_of(step), metrics));
}

}  // namespace examples
