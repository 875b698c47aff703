// SPDX-License-Identifier: Apache-2.0
#include "common/training_loop.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "ddp/core/logging.hpp"

namespace examples {

int64_t steps_per_epoch(int64_t batches_per_epoch, int64_t grad_accum_steps) {
  return std::max<int64_t>(1, (batches_per_epoch + grad_accum_steps - 1) / grad_accum_steps);
}

namespace {

/// True if the count is on the device. Only a few numbers are copied per step, so counts of later
/// micro-batches stay on the host.
bool has_device_count(const TrainingBatch& batch, at::Device device) {
  return batch.target_count != nullptr && batch.target_count->device() == device;
}

at::Tensor mean_over_targets(const at::Tensor& sum, const std::vector<TrainingBatch>& batches) {
  int64_t host_count = 0;
  at::Tensor count;
  for (const auto& batch : batches) {
    if (has_device_count(batch, sum.device())) {
      count = count.defined() ? count + *batch.target_count : *batch.target_count;
    } else {
      host_count += batch.num_targets;
    }
  }
  return count.defined() ? sum / (count + host_count).clamp_min(1)
                         : sum / static_cast<double>(std::max<int64_t>(1, host_count));
}

}  // namespace

TrainingLoop::TrainingLoop(const TrainingParts& parts, const TrainingSettings& settings)
    : parts_(parts),
      settings_(settings),
      guard_(parts.context, settings.train.non_finite, parts.optimizer, parts.scaler),
      sums_(parts.context.device()),
      step_(
          parts_.context,
          {.models = {&parts_.model}, .optimizers = {&parts_.optimizer}, .scaler = &parts_.scaler},
          [this](const Batches& batches, const ddp::StepScalars& scalars) {
            return run_step(batches, scalars);
          },
          training_options()),
      evaluation_(
          parts_.context, {.models = {&parts_.model}},
          [this](const TrainingBatch& batch, const ddp::StepScalars&) {
            ddp::Autocast autocast(settings_.amp);
            const auto result = parts_.task.evaluate(batch);
            if (has_device_count(batch, result.loss.device())) {
              sums_.add(result.loss, result.num_correct, *batch.target_count);
            } else {
              sums_.add(result.loss, result.num_correct, batch.num_targets);
            }
            return std::vector<at::Tensor>{};
          },
          evaluation_options(), step_.pool()),
      batches_per_epoch_(parts.task.num_batches()),
      steps_per_epoch_(steps_per_epoch(batches_per_epoch_, settings.train.grad_accum_steps)) {}

ddp::GraphedStepOptions TrainingLoop::training_options() const {
  ddp::GraphedStepOptions options{.mode = settings_.train.cuda_graph};
  const bool cuda = parts_.context.device().is_cuda();
  if (options.mode == ddp::CudaGraph::Auto && cuda && parts_.context.world_size() > 1 &&
      parts_.task.loss_is_sum()) {
    // By default, weighted means over several GPUs are not captured: only runs with plain means
    // were compared with eager ones.
    options.mode = ddp::CudaGraph::Off;
  }
  return options;
}

ddp::GraphedStepOptions TrainingLoop::evaluation_options() const {
  auto options = training_options();
  options.collective = false;
  options.name = "the evaluation step";
  return options;
}

TrainingSummary TrainingLoop::run(ddp::Checkpointer& checkpointer, int64_t first_step) {
  TrainingSummary summary;
  summary.first_step = first_step;
  summary.num_steps = settings_.num_steps;
  if (first_step >= settings_.num_steps) {
    summary.test = evaluate();  // nothing left to train: only evaluate
    return summary;
  }
  parts_.module.train();
  checkpointer.set_before_save([this] { return guard_.before_save(); });
  parts_.metrics.begin(first_step);
  if (settings_.train.eval_first && first_step == 0) {
    summary.test_before = evaluate_after(0);
  }
  for (int64_t step = first_step; step < settings_.num_steps; ++step) {
    parts_.metrics.end_step(step, train_step(step));
    guard_.end_step(step, last_log_, {.loss = 0, .first_non_finite = norm_is_wanted_ ? 3 : -1});
    if (is_logged(step) || is_last(step)) {
      guard_.look();
    }
    tell_of_non_finite_gradients(step);
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
  checkpointer.wait();               // throws if the last save failed, instead of a summary
  checkpointer.set_before_save({});  // the checkpointer may outlive the loop
  guard_.check_weights();
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

bool TrainingLoop::is_logged(int64_t step) const {
  return settings_.log_every > 0 && (step + 1) % settings_.log_every == 0;
}

bool TrainingLoop::wants_norm(int64_t step) const {
  return settings_.train.max_grad_norm > 0 || guard_.skips() || is_logged(step);
}

/// Reports the non-finite gradients found by the steps' scans, at steps where the host waits
/// anyway. With a loss scale they are normal; without one the weights are lost.
void TrainingLoop::tell_of_non_finite_gradients(int64_t step) {
  if (!(is_logged(step) || is_last(step)) || !parts_.context.is_main()) {
    return;
  }
  const auto found = parts_.optimizer.non_finite_report();
  const int64_t steps = found.num_scans - std::exchange(non_finite_steps_, found.num_scans);
  if (steps <= 0) {
    return;
  }
  const bool skipped = parts_.scaler.is_enabled();
  const char* advice =
      skipped          ? "skipped, and the loss scale is lowered"
      : guard_.skips() ? "skipped (train.non_finite=skip); where that goes on, lower lr_schedule.lr"
      : settings_.train.max_grad_norm > 0
          ? "taken over by the weights: lower lr_schedule.lr or train.max_grad_norm"
          : "taken over by the weights: lower lr_schedule.lr, or set train.max_grad_norm";
  ddp::log(skipped ? ddp::LogLevel::Info : ddp::LogLevel::Warning,
           ddp::concat("inf or NaN in the gradients of ", steps, " of the steps up to ", step + 1,
                       ", in the last of them first in ", found.parameter, ": ", advice));
}

ddp::StepMetrics TrainingLoop::train_step(int64_t step) {
  // An epoch's last step takes the remaining batches.
  const int64_t accum = settings_.train.grad_accum_steps;
  const int64_t first_batch = step % steps_per_epoch_ * accum;
  const int64_t num_micro_steps = std::clamp<int64_t>(batches_per_epoch_ - first_batch, 1, accum);
  ddp::StepMetrics metrics;
  metrics.lr = parts_.lr_schedule.at(step);
  metrics.num_targets = 0;
  Batches batches;
  for (int64_t micro = 0; micro < num_micro_steps; ++micro) {
    const auto& batch = batches.emplace_back(parts_.task.load(step * accum + micro));
    metrics.num_samples += batch.num_samples;
    *metrics.num_targets += batch.num_targets;
  }
  norm_is_wanted_ = wants_norm(step);
  // An epoch's last batch may be smaller, and its size may differ between ranks.
  const bool has_last = first_batch + num_micro_steps >= batches_per_epoch_;
  const bool uneven = has_last && parts_.context.world_size() > 1;
  metrics.log = step_(std::move(batches), {.lr = *metrics.lr,
                                           .step = step,
                                           .variant = (norm_is_wanted_ ? 1 : 0) + (uneven ? 2 : 0)})
                    .log;
  last_log_ = metrics.log;
  metrics.loss_at = 0;
  metrics.num_correct_at = 1;
  metrics.grad_norm_at = norm_is_wanted_ ? 2 : -1;
  return metrics;
}

TrainingLoop::StepOutputs TrainingLoop::run_step(const Batches& batches,
                                                 const ddp::StepScalars& scalars) {
  StepOutputs outputs;
  parts_.model.zero_grad();
  for (size_t micro = 0; micro < batches.size(); ++micro) {
    std::optional<ddp::NoSync> no_sync;
    if (micro + 1 < batches.size()) {
      no_sync.emplace(parts_.model);
    }
    micro_step(batches[micro], batches.size(), outputs);
  }
  if (parts_.task.loss_is_sum()) {
    outputs.loss = mean_over_targets(outputs.loss, batches);
  }
  update(scalars, outputs);
  parts_.scaler.update();
  if (parts_.ema != nullptr) {
    parts_.ema->update();
  }
  return outputs;
}

void TrainingLoop::update(const ddp::StepScalars& scalars, StepOutputs& outputs) {
  if (norm_is_wanted_) {
    const auto found = parts_.scaler.clip_and_step(parts_.optimizer, scalars,
                                                   settings_.train.max_grad_norm, guard_.skips());
    outputs.grad_norm = found.norm;
    outputs.first_non_finite = found.first_non_finite;
    return;
  }
  parts_.scaler.step(parts_.optimizer, scalars);
}

void TrainingLoop::micro_step(const TrainingBatch& batch, size_t num_micro_steps,
                              StepOutputs& outputs) {
  MicroBatchResult result;
  {
    ddp::Autocast autocast(settings_.amp);
    result = parts_.task.forward(batch);
  }
  auto share = result.loss;
  if (parts_.task.loss_is_sum()) {
    const double weight = parts_.task.target_weight();
    const auto scaled = parts_.scaler.scale(guard_.watch(share * weight));
    if (has_device_count(batch, share.device())) {
      parts_.model.weighted_backward(scaled, *batch.target_count * weight);
    } else {
      parts_.model.weighted_backward(scaled, static_cast<double>(batch.num_targets) * weight);
    }
  } else {
    // The loss's share of the step's mean; a single batch needs no extra kernels.
    share = num_micro_steps == 1 ? share : share / static_cast<double>(num_micro_steps);
    parts_.scaler.scale(guard_.watch(share)).backward();
  }
  const bool first = !outputs.loss.defined();
  outputs.loss = first ? share.detach() : outputs.loss + share.detach();
  outputs.num_correct = first ? result.num_correct : outputs.num_correct + result.num_correct;
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
  if (last_log_.size() > 0) {
    // If another rank left the step, this wait reports it; the evaluation's waits do not.
    static_cast<void>(last_log_[0]);
  }
  torch::NoGradGuard no_grad;
  parts_.model.sync_buffers();  // all ranks get rank 0's running statistics
  std::shared_ptr<ddp::Ema::Swap> swap;
  if (parts_.ema != nullptr) {
    swap = parts_.ema->swap_in();
  }
  parts_.module.eval();
  sums_.clear();
  {
    ddp::Autocast autocast(settings_.amp);  // one scope: each weight is cast once
    parts_.task.for_each_evaluation_batch(
        [this](TrainingBatch batch) { evaluation_(std::move(batch), {}); });
  }
  parts_.module.train();
  parts_.context.communicator()->all_reduce(sums_.values())->wait();
  const auto host = sums_.values().to(torch::kCPU);
  const auto* values = host.const_data_ptr<double>();
  const double count = std::max(1.0, values[2]);
  return {.loss = values[0] / count,
          .accuracy = values[1] / count,
          .num_targets = static_cast<int64_t>(values[2])};
}

}  // namespace examples
