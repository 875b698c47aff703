// SPDX-License-Identifier: Apache-2.0
// What trainers of independent samples (images, rows of tensors) share: the run around a task, and
// its summary.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "common/run_plan.hpp"
#include "common/training_loop.hpp"
#include "common/training_report.hpp"
#include "ddp/ddp.hpp"

namespace examples {

/// A wrapped model; `model` wraps `module`.
struct SampleModel {
  ddp::DataParallelModel& model;
  torch::nn::Module& module;
  double ema_decay = 0;         ///< evaluations use the average of the weights; 0: off
  std::string weights = "";     ///< the file whose weights `module` has; empty: none
  bool only_evaluates = false;  ///< what restore_trained() loads, without training
  /// Called at the end, also of a run that only evaluates, while `module` has the evaluated
  /// weights.
  std::function<void()> save_trained = {};
};

/// The setting `ema_decay` of a model's section.
void describe_ema_decay(double& decay, ddp::FieldVisitor& visitor);

struct SampleRun {
  TrainingSummary training{};
  std::string hash{};  ///< of the trained parameters
  int64_t last_saved_step = 0;
  std::string metrics_folder{};
  bool has_averages = false;
  std::string evaluated{};  ///< the weights of a run that only evaluates; empty: it trained
};

/// Follows a result in the output, if there are averages.
inline constexpr const char* kByAverages = ", by the averages of weights and buffers";

std::unique_ptr<ddp::Ema> make_ema(const ddp::DataParallelModel& model, double decay);

/// Refuses to evaluate other weights of the best checkpoint than those it was chosen by. Names this
/// run's for later checkpoints. Call it after restore().
void agree_on_evaluated_weights(ddp::Checkpointer& checkpointer, bool has_averages,
                                const ddp::CheckpointOptions& options);

/// Loads what a run that does not train uses: the newest checkpoint of checkpoint.dir, the best one
/// with checkpoint.resume=best, or without a folder the file `weights`, which `model` has already.
/// Returns its name. Throws SettingsError without both, and as Checkpointer::restore. Collective.
std::string restore_trained(const ddp::Context& ctx, const ddp::Config& cfg,
                            ddp::DataParallelModel& model, const std::unique_ptr<ddp::Ema>& ema,
                            const std::string& weights);

/// Trains `task`, whose training batches `loader` makes, with evaluations and checkpoints.
/// cfg.metrics.run names the samples. With checkpoint.resume=best it only evaluates. Collective.
template <TrainingBatch Batch, typename Loader>
SampleRun train_samples(ddp::Context& ctx, ddp::Config cfg, const SampleModel& wrapped,
                        Loader& loader, TrainingTask<Batch>& task) {
  auto& model = wrapped.model;
  const bool only_evaluates = wrapped.only_evaluates || cfg.checkpoint.resume == ddp::Resume::Best;
  if (only_evaluates) {
    cfg.metrics.dir = "";
  }
  auto optimizer = ddp::make_optimizer(model, cfg.optimizer);
  ddp::GradScaler scaler(cfg.amp);
  const auto ema = make_ema(model, wrapped.ema_decay);
  const auto num_steps = plan_run(cfg, ctx, loader.num_batches());
  if (cfg.amp.dtype == ddp::AmpDtype::Off &&
      wrapped.module.parameters().front().scalar_type() == torch::kBFloat16) {
    cfg.metrics.run.precision = "bf16";
  }
  const ddp::LrSchedule lr_schedule(cfg.lr_schedule);
  ddp::Metrics metrics(ctx, cfg.metrics);
  TrainingLoop<Batch> loop(task,
                           {.context = ctx,
                            .model = model,
                            .module = wrapped.module,
                            .optimizer = *optimizer,
                            .lr_schedule = lr_schedule,
                            .scaler = scaler,
                            .metrics = metrics,
                            .ema = ema.get()},
                           {.train = cfg.train,
                            .amp = cfg.amp,
                            .num_steps = num_steps,
                            .log_every = cfg.metrics.log_every,
                            .stop_check_seconds = cfg.checkpoint.stop_check_seconds,
                            .keep_best = cfg.checkpoint.keep_best});
  const auto save_trained = [&] {
    if (wrapped.save_trained) {
      const auto averages = ema ? ema->swap_in() : nullptr;
      wrapped.save_trained();
    }
  };
  if (only_evaluates) {
    SampleRun run{.has_averages = ema != nullptr,
                  .evaluated = restore_trained(ctx, cfg, model, ema, wrapped.weights)};
    run.training.test = loop.evaluate();
    save_trained();
    return run;
  }
  auto checkpointer =
      ema ? ddp::Checkpointer(ctx, cfg.checkpoint, {model, optimizer, scaler, loader, ema})
          : ddp::Checkpointer(ctx, cfg.checkpoint, {model, optimizer, scaler, loader});
  const int64_t first_step = checkpointer.restore();
  agree_on_evaluated_weights(checkpointer, ema != nullptr, cfg.checkpoint);
  SampleRun run{.training = loop.run(checkpointer, first_step)};
  run.has_averages = ema != nullptr;
  run.hash = common_parameter_hash(model.trained_parameters(), ctx.control_plane());
  run.last_saved_step = checkpointer.last_saved_step();
  run.metrics_folder = metrics.folder();
  save_trained();
  return run;
}

/// True if batch sizes differ between ranks: losses are then averaged over samples, not over ranks.
inline bool has_uneven_batches(const ddp::Config& cfg, const ddp::Context& ctx) {
  return !cfg.sampler.pad || cfg.loader.global_batch_size % ctx.world_size() != 0;
}

/// Runs `evaluate` with the sizes of this rank's evaluation batches, in evaluation mode and without
/// gradients, so that a program that refuses a size does so before the training. Does nothing in a
/// run without evaluations. The SettingsError then names the size.
void rehearse_evaluation(const ddp::Context& ctx, const ddp::Config& cfg, torch::nn::Module& module,
                         int64_t num_samples, const std::function<void(int64_t size)>& evaluate);

/// The summary's lines. `samples` names the samples of the data; `more` follows the rate.
std::string sample_report(const SampleRun& run, const std::string& samples, const std::string& more,
                          const ddp::Context& ctx, const ddp::Config& cfg);

}  // namespace examples
