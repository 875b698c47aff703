// SPDX-License-Identifier: Apache-2.0
#include "common/image_trainer.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <iostream>
#include <string>
#include <utility>

#include "common/data_path.hpp"
#include "common/image_task.hpp"
#include "common/run_plan.hpp"
#include "common/training_loop.hpp"
#include "common/training_report.hpp"
#include "ddp/detail/text.hpp"

namespace examples {
namespace {

std::unique_ptr<ddp::Ema> make_ema(const ddp::DataParallelModel& model, double decay) {
  return decay > 0 ? std::make_unique<ddp::Ema>(model, ddp::EmaOptions{.decay = decay}) : nullptr;
}

/// The key of a checkpoint's text: the weights of which evaluations, and a best metric, are.
constexpr const char* kEvaluatedWeights = "evaluated_weights";
constexpr const char* kAverages = "averages";
constexpr const char* kCurrent = "current";

/// Refuses to evaluate other weights of the best checkpoint than those it was chosen by. Names this
/// run's for later checkpoints.
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

std::string next_command(const ImageProgram& program, const ddp::Config& cfg,
                         const ddp::Context& ctx) {
  if (cfg.data.path.find("sample") == std::string::npos) {
    return program.name + std::string(" --help     (options, settings and their meaning)");
  }
  if (!ctx.device().is_cuda()) {
    return program.longer_run +
           std::string("     (trains longer on the sample; all of CIFAR-10 needs a GPU)");
  }
  ddp::detail::TextStream line;
  if (ctx.world_size() > 1) {
    line << "torchrun --no-python --nproc-per-node=" << ctx.world_size() << ' ';
  }
  line << "build/examples/" << program.name << " --config " << program.cifar10_config
       << " train.batch_size=" << 512 / ctx.world_size()
       << " data.path=FOLDER     (all of CIFAR-10; see data/README.md)";
  return line.str();
}

/// Returns a summary line; empty unless data.corrupt=skip. Each rank counts the corrupt images that
/// it has read; the line has the maximum over ranks. Collective.
std::string corrupt_images(const ImageData& data, ddp::Context& ctx, const ddp::Config& cfg) {
  if (cfg.data.corrupt != ddp::CorruptPolicy::Skip) {
    return {};
  }
  ddp::detail::TextStream line;
  line << "corrupt images ";
  for (const auto& [split, name] : {std::pair{data.train, "training"}, {data.test, "test"}}) {
    int64_t most = 0;
    for (const auto& counts : ctx.control_plane().all_gather_numbers({split->num_skipped()})) {
      most = std::max(most, counts.at(0));
    }
    line << ' ' << most << " of " << split->size() << ' ' << name << " images,";
  }
  line << " replaced by others\n";
  return line.str();
}

void print_summary(const TrainingSummary& summary, const std::string& hash,
                   const std::string& corrupt, const ddp::Context& ctx, const ddp::Config& cfg,
                   const ddp::Metrics& metrics, int64_t last_saved_step, bool has_averages,
                   const ImageProgram& program) {
  if (!ctx.is_main()) {
    return;
  }
  ddp::detail::TextStream out;
  out << '\n' << summary.first_lines();
  if (summary.test.num_targets > 0) {
    out << format("test accuracy   %.2f %% of %lld images (loss %.4f)%s\n",
                  100 * summary.test.accuracy, static_cast<long long>(summary.test.num_targets),
                  summary.test.loss,
                  has_averages ? ", by the averages of weights and buffers" : "");
  }
  if (summary.samples_per_second() > 0) {
    out << format("images/s        %.1f on %d rank(s)\n", summary.samples_per_second(),
                  ctx.world_size());
  }
  out << corrupt;
  out << "parameters      " << hash << ", equal on all " << ctx.world_size() << " rank(s)"
      << (has_averages ? "; not averaged" : "") << '\n';
  if (!cfg.checkpoint.dir.empty()) {
    out << "checkpoint      " << cfg.checkpoint.dir << ", after step " << last_saved_step << '\n';
  }
  if (!metrics.folder().empty()) {
    out << "CSV and JSONL   " << metrics.folder()
        << " (steps.csv, steps.jsonl, epochs.csv, epochs.jsonl)\n";
  }
  out << "next            " << next_command(program, cfg, ctx) << '\n';
  std::cout << out.str() << std::flush;
}

}  // namespace

ImageData open_image_data(ddp::DataOptions options, bool channels_last) {
  options.path = find_data_path(options.path);
  options.channels_last = channels_last;
  ImageData data{ddp::make_dataset(options, ddp::Split::Train),
                 ddp::make_dataset(options, ddp::Split::Test)};
  require_same_classes(*data.train, *data.test);
  return data;
}

ddp::ImageDtype choose_image_dtype(const ddp::Config& cfg, c10::ScalarType parameter_dtype) {
  const bool bf16 = parameter_dtype == torch::kBFloat16;
  if (bf16 && cfg.amp.dtype == ddp::AmpDtype::Fp16) {  // autocast would cast every weight
    throw ddp::SettingsError(
        "model.dtype=bf16 contradicts amp.dtype=fp16; fix: amp.dtype=off, or model.dtype=fp32");
  }
  if (cfg.loader.image_dtype != ddp::ImageDtype::Auto || cfg.train.mixup > 0) {
    return cfg.loader.image_dtype;
  }
  if (bf16 || cfg.amp.dtype == ddp::AmpDtype::Bf16) {
    return ddp::ImageDtype::Bf16;
  }
  return cfg.amp.dtype == ddp::AmpDtype::Fp16 ? ddp::ImageDtype::Fp16 : ddp::ImageDtype::Auto;
}

void train_images(ddp::Context& ctx, ddp::Config cfg, const ImageData& data,
                  const ImageModel& classifier, const ImageProgram& program) {
  auto& model = classifier.model;
  auto optimizer = ddp::make_optimizer(model, cfg.optimizer);
  ddp::GradScaler scaler(cfg.amp);
  const auto ema = make_ema(model, classifier.ema_decay);

  ddp::DistributedSampler sampler(data.train->size(), ctx.communicator(), cfg.sampler);
  ddp::DataLoader train_loader(data.train, sampler, ctx.device(), cfg.loader);
  ddp::DistributedSampler eval_sampler(data.test->size(), ctx.communicator(),
                                       ddp::eval_sampler_options(cfg.sampler));
  ddp::DataLoader eval_loader(data.test, eval_sampler, ctx.device(), eval_loader_options(cfg));

  const auto num_steps = plan_run(cfg, ctx, train_loader.num_batches());
  cfg.metrics.run.sample_unit = "images";
  if (cfg.amp.dtype == ddp::AmpDtype::Off &&
      classifier.module.parameters().front().scalar_type() == torch::kBFloat16) {
    cfg.metrics.run.precision = "bf16";
  }
  const ddp::LrSchedule lr_schedule(cfg.lr_schedule);
  ddp::Metrics metrics(ctx, cfg.metrics);
  metrics.observe(model);
  metrics.observe(train_loader);

  const bool weighted = !cfg.sampler.pad || cfg.loader.global_batch_size % ctx.world_size() != 0;
  ImageTask task(
      {.forward = classifier.forward, .train_loader = train_loader, .eval_loader = eval_loader},
      {.mix = {.mixup = cfg.train.mixup,
               .cutmix = cfg.train.cutmix,
               .seed = static_cast<uint64_t>(cfg.sampler.seed),
               .rank = ctx.rank()},
       .label_smoothing = cfg.train.label_smoothing,
       .weighted = weighted});
  TrainingLoop<ImageBatch> loop(task,
                                {.context = ctx,
                                 .model = model,
                                 .module = classifier.module,
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
  auto checkpointer =
      ema ? ddp::Checkpointer(ctx, cfg.checkpoint, {model, optimizer, scaler, train_loader, ema})
          : ddp::Checkpointer(ctx, cfg.checkpoint, {model, optimizer, scaler, train_loader});
  const int64_t first_step = checkpointer.restore();
  agree_on_evaluated_weights(checkpointer, ema != nullptr, cfg.checkpoint);
  const auto summary = loop.run(checkpointer, first_step);
  const auto hash = common_parameter_hash(model.trained_parameters(), ctx.control_plane());
  print_summary(summary, hash, corrupt_images(data, ctx, cfg), ctx, cfg, metrics,
                checkpointer.last_saved_step(), ema != nullptr, program);
}

}  // namespace examples
