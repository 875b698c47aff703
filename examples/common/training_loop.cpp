// SPDX-License-Identifier: Apache-2.0
#include "common/training_loop.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "common/mixup.hpp"

namespace examples {
namespace {

torch::Tensor count_hits(const torch::Tensor& logits, const torch::Tensor& target) {
  return logits.detach().argmax(1).eq(target).sum();
}

}  // namespace

int64_t steps_per_epoch(int64_t batches_per_epoch, int64_t grad_accum_steps) {
  return std::max<int64_t>(1, (batches_per_epoch + grad_accum_steps - 1) / grad_accum_steps);
}

TrainingLoop::TrainingLoop(const TrainingParts& parts, const TrainingSettings& settings)
    : parts_(parts),
      settings_(settings),
      batches_per_epoch_(parts.train_loader.num_batches()),
      steps_per_epoch_(steps_per_epoch(batches_per_epoch_, settings.train.grad_accum_steps)) {
  if (settings.train.mixup > kMaxMixupAlpha) {
    throw ddp::SettingsError(ddp::detail::concat("train.mixup = ", settings.train.mixup,
                                                 ": give an alpha of at most ", kMaxMixupAlpha));
  }
}

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
  for (int64_t step = first_step; step < settings_.num_steps; ++step) {
    parts_.metrics.end_step(step, train_step(step));
    const bool last = step + 1 == settings_.num_steps;
    bool evaluated = false;
    if ((step + 1) % steps_per_epoch_ == 0 || last) {
      evaluated = end_epoch(step, summary);
    }
    if (last || (evaluated && settings_.keep_best != "off")) {
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

ddp::StepMetrics TrainingLoop::train_step(int64_t step) {
  // An epoch's last step takes the batches that are left.
  const int64_t accum = settings_.train.grad_accum_steps;
  const int64_t first_batch = step % steps_per_epoch_ * accum;
  const int64_t num_micro_steps = std::clamp<int64_t>(batches_per_epoch_ - first_batch, 1, accum);
  ddp::StepMetrics metrics;
  metrics.lr = parts_.lr_schedule.at(step);
  parts_.model.zero_grad();
  for (int64_t micro = 0; micro < num_micro_steps; ++micro) {
    const auto batch = parts_.train_loader.next();
    std::optional<ddp::NoSync> no_sync;
    if (micro + 1 < num_micro_steps) {
      no_sync.emplace(parts_.model);
    }
    micro_step(batch, step * accum + micro, num_micro_steps, metrics);
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

void TrainingLoop::micro_step(const ddp::Batch& batch, int64_t draw, int64_t num_micro_steps,
                              ddp::StepMetrics& metrics) {
  const auto& train = settings_.train;
  double weight = 1.0;
  auto images = batch.data;
  if (train.mixup > 0) {
    weight = mixup_weight(train.mixup, static_cast<uint64_t>(settings_.seed), draw,
                          parts_.context.rank());
    images = mix_images(images, weight);
  }
  torch::Tensor loss;
  torch::Tensor logits;
  {
    ddp::Autocast autocast(settings_.amp);
    logits = parts_.forward(images);
    loss = classification_loss(logits, batch.target, train.label_smoothing, weight);
  }
  // The loss's share of the step's mean; the usual single batch costs no extra kernels.
  const auto share = num_micro_steps == 1 ? loss : loss / static_cast<double>(num_micro_steps);
  if (settings_.weighted) {
    const auto count = static_cast<double>(batch.size());
    parts_.model.weighted_backward(parts_.scaler.scale(loss * count), count);
  } else {
    parts_.scaler.scale(share).backward();
  }
  const auto hits = count_hits(logits, batch.target);
  const bool first = !metrics.loss.defined();
  metrics.loss = first ? share.detach() : metrics.loss + share.detach();
  metrics.num_correct = first ? hits : metrics.num_correct + hits;
  metrics.num_samples += batch.size();
}

bool TrainingLoop::end_epoch(int64_t step, TrainingSummary& summary) {
  const int64_t epoch = step / steps_per_epoch_;
  const int64_t every = settings_.train.eval_every;
  const bool last = step + 1 == settings_.num_steps;
  ddp::EpochMetrics metrics;
  const bool evaluates = every > 0 && (last || (epoch + 1) % every == 0);
  if (evaluates) {
    ddp::Metrics::ClockPause pause(parts_.metrics);
    summary.test = evaluate();
    metrics = {.test_loss = summary.test.loss, .test_accuracy = summary.test.accuracy};
  }
  summary.last_epoch = parts_.metrics.end_epoch(epoch, metrics);
  if (std::exchange(first_epoch_, false)) {
    summary.first_epoch = summary.last_epoch;
  }
  if (std::isfinite(summary.last_epoch.images_per_second)) {
    train_seconds_ += summary.last_epoch.seconds;
    timed_images_ += summary.last_epoch.images_per_second * summary.last_epoch.seconds;
    summary.images_per_second = timed_images_ / train_seconds_;
  }
  return evaluates;
}

EvalResult TrainingLoop::evaluate() {
  torch::NoGradGuard no_grad;
  parts_.model.sync_buffers();  // running statistics are rank 0's everywhere
  std::optional<ddp::Ema::Swap> swap;
  if (parts_.ema != nullptr) {
    swap.emplace(parts_.ema->swap_in());
  }
  parts_.module.eval();
  // [3]: loss * samples, hits, samples
  auto sums = torch::zeros(
      {3}, torch::TensorOptions().dtype(torch::kFloat64).device(parts_.context.device()));
  {
    ddp::Autocast autocast(settings_.amp);  // one scope: each weight is cast once
    for (auto& batch : parts_.eval_loader) {
      const auto logits = parts_.forward(batch.data);
      const auto hits = count_hits(logits, batch.target).to(torch::kFloat64);
      const auto loss = torch::cross_entropy_loss(logits, batch.target, {}, at::Reduction::Sum);
      const auto count = torch::full_like(hits, static_cast<double>(batch.size()));
      sums += torch::stack({loss.to(torch::kFloat64), hits, count});
    }
  }
  parts_.module.train();
  parts_.context.communicator()->all_reduce(sums)->wait();
  const auto host = sums.to(torch::kCPU);
  const auto* values = host.const_data_ptr<double>();
  const double count = std::max(1.0, values[2]);
  return {.loss = values[0] / count,
          .accuracy = values[1] / count,
          .num_samples = static_cast<int64_t>(values[2])};
}

}  // namespace examples
