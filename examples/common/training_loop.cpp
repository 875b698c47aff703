// SPDX-License-Identifier: Apache-2.0
#include "common/training_loop.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

namespace examples {

int64_t steps_per_epoch(int64_t batches_per_epoch, int64_t grad_accum_steps) {
  return std::max<int64_t>(1, (batches_per_epoch + grad_accum_steps - 1) / grad_accum_steps);
}

TrainingLoop::TrainingLoop(const TrainingParts& parts, const TrainingSettings& settings)
    : parts_(parts),
      settings_(settings),
      batches_per_epoch_(parts.task.num_batches()),
      steps_per_epoch_(steps_per_epoch(batches_per_epoch_, settings.train.grad_accum_steps)) {}

TrainingSummary TrainingLoop::run(ddp::Checkpointer& checkpointer, int64_t first_step) {
  TrainingSummary summary;
  summary.first_step = first_step;
  summary.num_steps = settings_.num_steps;
  if (first_step >= settings_.num_steps) {
    summary.test = evaluate();  // nothing left to train or to save: say how good the model is
    return summary;
  }
  parts_.module.train();
  parts_.metrics.begin(first_step);
  if (settings_.train.eval_first && first_step == 0) {
    summary.test_before = evaluate_after(0);
  }
  for (int64_t step = first_step; step < settings_.num_steps; ++step) {
    parts_.metrics.end_step(step, train_step(step));
    const bool evaluated = evaluates_after(step);
    if (evaluated) {
      summary.test = evaluate_after(step + 1);
    }
    if (ends_epoch(step)) {
      end_epoch(step, evaluated, summary);
    }
    if (is_last(step) || (evaluated && settings_.keep_best != "off")) {
      checkpointer.save(step, evaluated ? std::optional(metric_of(summary.test)) : std::nullopt);
    }
    checkpointer.save_if_due(step);
  }
  checkpointer.wait();  // throws where the last save failed: no summary of what is lost
  return summary;
}

double TrainingLoop::metric_of(const EvalResult& test) const {
  return settings_.keep_best == "min" ? test.loss : test.accuracy;
}

bool TrainingLoop::ends_epoch(int64_t step) const {
  return is_last(step) || (step + 1) % steps_per_epoch_ == 0;
}

bool TrainingLoop::evaluates_after(int64_t step) const {
  const auto& train = settings_.train;
  if (train.eval_every_steps > 0) {
    return is_last(step) || (step + 1) % train.eval_every_steps == 0;
  }
  const int64_t epoch = step / steps_per_epoch_;
  return ends_epoch(step) && train.eval_every > 0 &&
         (is_last(step) || (epoch + 1) % train.eval_every == 0);
}

ddp::StepMetrics TrainingLoop::train_step(int64_t step) {
  // An epoch's last step takes the batches that are left.
  const int64_t accum = settings_.train.grad_accum_steps;
  const int64_t first_batch = step % steps_per_epoch_ * accum;
  const int64_t num_micro_steps = std::clamp<int64_t>(batches_per_epoch_ - first_batch, 1, accum);
  ddp::StepMetrics metrics;
  metrics.lr = parts_.lr_schedule.at(step);
  metrics.num_targets = 0;
  parts_.model.zero_grad();
  for (int64_t micro = 0; micro < num_micro_steps; ++micro) {
    parts_.task.load(step * accum + micro);
    std::optional<ddp::NoSync> no_sync;
    if (micro + 1 < num_micro_steps) {
      no_sync.emplace(parts_.model);
    }
    micro_step(num_micro_steps, metrics);
  }
  if (parts_.task.loss_is_sum()) {
    metrics.loss = metrics.loss / static_cast<double>(std::max<int64_t>(1, *metrics.num_targets));
  }
  parts_.scaler.unscale_(parts_.optimizer);
  const bool logged = settings_.log_every > 0 && (step + 1) % settings_.log_every == 0;
  if (settings_.train.max_grad_norm > 0 || logged) {
    metrics.grad_norm = ddp::clip_grad_norm_(parts_.model, settings_.train.max_grad_norm);
  }
  parts_.scaler.step(parts_.optimizer, *metrics.lr);
  parts_.scaler.update();
  if (parts_.ema != nullptr) {
    parts_.ema->update();
  }
  return metrics;
}

void TrainingLoop::micro_step(int64_t num_micro_steps, ddp::StepMetrics& metrics) {
  MicroBatchResult result;
  {
    ddp::Autocast autocast(settings_.amp);
    result = parts_.task.forward();
  }
  auto share = result.loss;
  if (parts_.task.loss_is_sum()) {
    const double weight = parts_.task.target_weight();
    parts_.model.weighted_backward(parts_.scaler.scale(share * weight),
                                   static_cast<double>(result.num_targets) * weight);
  } else {
    // The loss's share of the step's mean; the usual single batch costs no extra kernels.
    share = num_micro_steps == 1 ? share : share / static_cast<double>(num_micro_steps);
    parts_.scaler.scale(share).backward();
  }
  const bool first = !metrics.loss.defined();
  metrics.loss = first ? share.detach() : metrics.loss + share.detach();
  metrics.num_correct = first ? result.num_correct : metrics.num_correct + result.num_correct;
  metrics.num_samples += result.num_samples;
  *metrics.num_targets += result.num_targets;
}

EvalResult TrainingLoop::evaluate_after(int64_t steps_done) {
  ddp::Metrics::ClockPause pause(parts_.metrics);
  const auto test = evaluate();
  if (settings_.train.eval_every_steps > 0 || steps_done == 0) {
    parts_.metrics.add_evaluation(steps_done - 1,
                                  {.test_loss = test.loss, .test_accuracy = test.accuracy});
  }
  if (parts_.on_evaluation) {
    parts_.on_evaluation(steps_done, test);
  }
  return test;
}

void TrainingLoop::end_epoch(int64_t step, bool evaluated, TrainingSummary& summary) {
  ddp::EpochMetrics metrics;
  if (evaluated) {
    metrics = {.test_loss = summary.test.loss, .test_accuracy = summary.test.accuracy};
  }
  summary.last_epoch = parts_.metrics.end_epoch(step / steps_per_epoch_, metrics);
  if (std::exchange(first_epoch_, false)) {
    summary.first_epoch = summary.last_epoch;
  }
  if (std::isfinite(summary.last_epoch.samples_per_second)) {
    train_seconds_ += summary.last_epoch.seconds;
    timed_samples_ += summary.last_epoch.samples_per_second * summary.last_epoch.seconds;
    summary.samples_per_second = timed_samples_ / train_seconds_;
  }
}

EvalResult TrainingLoop::evaluate() {
  torch::NoGradGuard no_grad;
  parts_.model.sync_buffers();  // running statistics are rank 0's everywhere
  std::optional<ddp::Ema::Swap> swap;
  if (parts_.ema != nullptr) {
    swap.emplace(parts_.ema->swap_in());
  }
  parts_.module.eval();
  EvaluationSums sums(parts_.context.device());
  {
    ddp::Autocast autocast(settings_.amp);  // one scope: each weight is cast once
    parts_.task.evaluate(sums);
  }
  parts_.module.train();
  parts_.context.communicator()->all_reduce(sums.values())->wait();
  const auto host = sums.values().to(torch::kCPU);
  const auto* values = host.const_data_ptr<double>();
  const double count = std::max(1.0, values[2]);
  return {.loss = values[0] / count,
          .accuracy = values[1] / count,
          .num_targets = static_cast<int64_t>(values[2])};
}

}  // namespace examples
