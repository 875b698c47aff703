// SPDX-License-Identifier: Apache-2.0
#include "common/sample_trainer.hpp"

#include <algorithm>
#include <cmath>

#include "ddp/detail/text.hpp"

namespace examples {
namespace {

/// The key of a checkpoint's text: the weights of which evaluations, and a best metric, are.
constexpr const char* kEvaluatedWeights = "evaluated_weights";
constexpr const char* kAverages = "averages";
constexpr const char* kCurrent = "current";

std::string evaluation_line(const SampleRun& run, const std::string& samples) {
  const auto& test = run.training.test;
  if (test.num_targets == 0) {
    return "";
  }
  const auto count = static_cast<long long>(test.num_targets);
  return (std::isnan(test.accuracy)
              ? format("test loss       %.4f of %lld %s", test.loss, count, samples.c_str())
              : format("test accuracy   %.2f %% of %lld %s (loss %.4f)", 100 * test.accuracy, count,
                       samples.c_str(), test.loss)) +
         (run.has_averages ? std::string(kByAverages) + "\n" : "\n");
}

}  // namespace

void describe_ema_decay(double& decay, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "ema_decay",
                 .doc = "Decay of an exponential moving average of weights and buffers. Evaluation "
                        "uses the average. 0: off.",
                 .min = 0,
                 .max = 0.999999},
                decay);
}

std::unique_ptr<ddp::Ema> make_ema(const ddp::DataParallelModel& model, double decay) {
  return decay > 0 ? std::make_unique<ddp::Ema>(model, ddp::EmaOptions{.decay = decay}) : nullptr;
}

void agree_on_evaluated_weights(ddp::Checkpointer& checkpointer, bool has_averages,
                                const ddp::CheckpointOptions& options) {
  const auto saved = checkpointer.text(kEvaluatedWeights);
  if (options.resume == ddp::Resume::Best && saved == kAverages && !has_averages) {
    throw ddp::SettingsError(
        "checkpoint.resume=best: the best checkpoint in " + options.dir +
        " was chosen by its averaged weights, but model.ema_decay=0 would evaluate the others; "
        "fix: set model.ema_decay as in the run that saved");
  }
  checkpointer.set_text(kEvaluatedWeights, has_averages ? kAverages : kCurrent);
}

std::string restore_trained(const ddp::Context& ctx, const ddp::Config& cfg,
                            ddp::DataParallelModel& model, const std::unique_ptr<ddp::Ema>& ema,
                            const std::string& weights) {
  const auto options = reading_options(cfg.checkpoint);
  if (options.dir.empty() && options.resume != ddp::Resume::Best) {
    if (weights.empty()) {
      throw ddp::SettingsError(
          "there is no trained model: checkpoint.dir and model.weights are empty; fix: set "
          "checkpoint.dir to the folder of the run that saved");
    }
    return weights;
  }
  auto reader = ema ? ddp::Checkpointer(ctx, options, {model, ema})
                    : ddp::Checkpointer(ctx, options, {model});
  const auto steps_done = reader.restore();
  agree_on_evaluated_weights(reader, ema != nullptr, options);
  return ddp::concat(options.dir, " after step ", steps_done);
}

void rehearse_evaluation(const ddp::Context& ctx, const ddp::Config& cfg, torch::nn::Module& module,
                         int64_t num_samples, const std::function<void(int64_t size)>& evaluate) {
  if (cfg.train.eval_every == 0 && cfg.train.eval_every_steps == 0) {
    return;
  }
  const ddp::DistributedSampler sampler(num_samples, ctx.communicator(),
                                        ddp::eval_sampler_options(cfg.sampler));
  const auto whole = eval_loader_options(cfg).batch_size;
  const torch::NoGradGuard no_grad;
  const models::EvalScope eval(module);
  ddp::Autocast autocast(cfg.amp);
  for (const auto size : {std::min(whole, sampler.num_samples()), sampler.num_samples() % whole}) {
    if (size == 0) {
      continue;
    }
    try {
      evaluate(size);
    } catch (const ddp::SettingsError& error) {
      throw ddp::SettingsError(ddp::concat("an evaluation batch of ", size,
                                           size == 1 ? " sample: " : " samples: ", error.what(),
                                           "; train.eval_batch_size sets the size of all but the "
                                           "last"));
    }
  }
}

std::string sample_report(const SampleRun& run, const std::string& samples, const std::string& more,
                          const ddp::Context& ctx, const ddp::Config& cfg) {
  ddp::detail::TextStream out;
  if (!run.evaluated.empty()) {
    out << "\nevaluated       " << run.evaluated << '\n' << evaluation_line(run, samples) << more;
    return out.str();
  }
  out << '\n' << run.training.first_lines() << evaluation_line(run, samples);
  if (run.training.samples_per_second() > 0) {
    out << format("%-16s%.1f on %d rank(s)\n", (cfg.metrics.run.sample_unit + "/s").c_str(),
                  run.training.samples_per_second(), ctx.world_size());
  }
  out << more;
  out << "parameters      " << run.hash << ", equal on all " << ctx.world_size() << " rank(s)"
      << (run.has_averages ? "; not averaged" : "") << '\n';
  if (!cfg.checkpoint.dir.empty()) {
    out << "checkpoint      " << cfg.checkpoint.dir << ", after step " << run.last_saved_step
        << '\n';
  }
  if (!run.metrics_folder.empty()) {
    out << "CSV and JSONL   " << run.metrics_folder
        << " (steps.csv, steps.jsonl, epochs.csv, epochs.jsonl)\n";
  }
  return out.str();
}

}  // namespace examples
