// SPDX-License-Identifier: Apache-2.0
// Trains a ResNet on images, data-parallel: CIFAR-10 (official files or JPEG tar shards), folders
// of JPEGs, or synthetic images. `--help` lists every setting.
//
//   mpirun -n 2 build/examples/resnet_ddp --config examples/configs/quickstart.yaml
//   srun build/examples/resnet_ddp --config examples/configs/cifar10_resnet18_cifar_stem.yaml
//   torchrun --no-python --nproc-per-node=8 build/examples/resnet_ddp model.name=resnet50 …
#include <torch/torch.h>

#include <algorithm>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "common/data_path.hpp"
#include "common/image_task.hpp"
#include "common/model_options.hpp"
#include "common/run_plan.hpp"
#include "common/training_loop.hpp"
#include "common/training_report.hpp"
#include "ddp/ddp.hpp"

namespace {

using examples::ModelOptions;
using examples::TrainingSummary;

struct Data {
  std::shared_ptr<ddp::Dataset> train;
  std::shared_ptr<ddp::Dataset> test;
};

Data make_data(ddp::DataOptions options, const ModelOptions& model) {
  options.path = examples::find_data_path(options.path);
  options.channels_last = model.channels_last;
  Data data{ddp::make_dataset(options, ddp::Split::Train),
            ddp::make_dataset(options, ddp::Split::Test)};
  examples::require_same_classes(*data.train, *data.test);
  return data;
}

/// Averages parameters only. BatchNorm's running statistics differ between ranks, so their averages
/// would differ too.
std::unique_ptr<ddp::Ema> make_ema(const ddp::DataParallelModel& model, double decay) {
  if (decay <= 0) {
    return nullptr;
  }
  return std::make_unique<ddp::Ema>(model.named_parameters(), ddp::EmaOptions{.decay = decay});
}

std::string next_command(const ddp::Config& cfg, const ddp::Context& ctx) {
  const std::string program = "resnet_ddp";
  if (cfg.data.path.find("sample") == std::string::npos) {
    return program + " --help     (every setting, its default and meaning)";
  }
  if (!ctx.device().is_cuda()) {
    return "./quickstart.sh train.epochs=30     (trains longer on the sample; all of CIFAR-10 "
           "needs a GPU)";
  }
  std::ostringstream line;
  if (ctx.world_size() > 1) {
    line << "torchrun --no-python --nproc-per-node=" << ctx.world_size() << ' ';
  }
  line << "build/examples/" << program
       << " --config examples/configs/cifar10_resnet18_cifar_stem.yaml train.batch_size="
       << 512 / ctx.world_size() << " data.path=FOLDER     (all of CIFAR-10; see data/README.md)";
  return line.str();
}

/// Returns a summary line; empty unless data.corrupt=skip. Each rank counts the corrupt images that
/// it has read; the line has the maximum over ranks. Collective.
std::string corrupt_images(const Data& data, ddp::Context& ctx, const ddp::Config& cfg) {
  if (cfg.data.corrupt != ddp::CorruptPolicy::Skip) {
    return {};
  }
  std::ostringstream line;
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
                   const ddp::Metrics& metrics, int64_t last_saved_step) {
  if (!ctx.is_main()) {
    return;
  }
  std::ostringstream out;
  out << '\n' << summary.first_lines();
  if (summary.test.num_targets > 0) {
    out << examples::format("test accuracy   %.2f %% of %lld images (loss %.4f)\n",
                            100 * summary.test.accuracy,
                            static_cast<long long>(summary.test.num_targets), summary.test.loss);
  }
  if (summary.samples_per_second() > 0) {
    out << examples::format("images/s        %.1f on %d rank(s)\n", summary.samples_per_second(),
                            ctx.world_size());
  }
  out << corrupt;
  out << "parameters      " << hash << ", equal on all " << ctx.world_size() << " rank(s)\n";
  if (!cfg.checkpoint.dir.empty()) {
    out << "checkpoint      " << cfg.checkpoint.dir << ", after step " << last_saved_step << '\n';
  }
  if (!metrics.folder().empty()) {
    out << "CSV and JSONL   " << metrics.folder() << " (steps.csv, steps.jsonl, epochs.csv)\n";
  }
  out << "next            " << next_command(cfg, ctx) << '\n';
  std::cout << out.str() << std::flush;
}

/// The loader's image dtype: the model's compute dtype or, with mixup, the configured one, because
/// mixup needs unrounded images.
ddp::ImageDtype image_dtype(const ddp::Config& cfg, const ModelOptions& model) {
  if (cfg.loader.image_dtype != ddp::ImageDtype::Auto || cfg.train.mixup > 0) {
    return cfg.loader.image_dtype;
  }
  if (model.dtype == torch::kBFloat16) {
    return ddp::ImageDtype::Bf16;
  }
  switch (cfg.amp.dtype) {
    case ddp::AmpDtype::Bf16:
      return ddp::ImageDtype::Bf16;
    case ddp::AmpDtype::Fp16:
      return ddp::ImageDtype::Fp16;
    default:
      return ddp::ImageDtype::Auto;
  }
}

/// Refuses two dtypes: autocast would cast every weight back and forth.
void require_one_dtype(const ddp::Config& cfg, const ModelOptions& model) {
  if (model.dtype == torch::kBFloat16 && cfg.amp.dtype == ddp::AmpDtype::Fp16) {
    throw ddp::SettingsError(
        "model.dtype=bf16 contradicts amp.dtype=fp16; fix: amp.dtype=off, or model.dtype=fp32");
  }
}

void train(ddp::Context& ctx, ddp::Config cfg) {
  const auto model_options = cfg.section<ModelOptions>("model");
  require_one_dtype(cfg, model_options);
  cfg.loader.image_dtype = image_dtype(cfg, model_options);
  const auto data = make_data(cfg.data, model_options);
  auto module = examples::make_model(model_options, data.train->num_classes(), ctx.communicator());
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  auto optimizer = ddp::make_optimizer(model, cfg.optimizer);
  ddp::GradScaler scaler(cfg.amp);
  const auto ema = make_ema(model, model_options.ema_decay);

  ddp::DistributedSampler sampler(data.train->size(), ctx.communicator(), cfg.sampler);
  ddp::DataLoader train_loader(data.train, sampler, ctx.device(), cfg.loader);
  ddp::DistributedSampler eval_sampler(data.test->size(), ctx.communicator(),
                                       ddp::eval_sampler_options(cfg.sampler));
  ddp::DataLoader eval_loader(data.test, eval_sampler, ctx.device(),
                              examples::eval_loader_options(cfg));

  const auto plan = examples::plan_run(cfg, ctx, train_loader.num_batches());
  const ddp::LrSchedule lr_schedule(cfg.lr_schedule);
  ddp::Metrics metrics(ctx, cfg.metrics);
  metrics.observe(model);
  metrics.observe(train_loader);

  const bool weighted = !cfg.sampler.pad || cfg.loader.global_batch_size % ctx.world_size() != 0;
  examples::ImageTask task({.forward = [&](const torch::Tensor& x) { return model.forward(x); },
                            .train_loader = train_loader,
                            .eval_loader = eval_loader},
                           {.mixup = cfg.train.mixup,
                            .label_smoothing = cfg.train.label_smoothing,
                            .seed = static_cast<uint64_t>(cfg.sampler.seed),
                            .rank = ctx.rank(),
                            .weighted = weighted});
  examples::TrainingLoop loop(task,
                              {.context = ctx,
                               .model = model,
                               .module = *module,
                               .optimizer = *optimizer,
                               .lr_schedule = lr_schedule,
                               .scaler = scaler,
                               .metrics = metrics,
                               .ema = ema.get()},
                              {.train = cfg.train,
                               .amp = cfg.amp,
                               .num_steps = plan.num_steps,
                               .log_every = cfg.metrics.log_every,
                               .keep_best = cfg.checkpoint.keep_best});
  auto checkpointer =
      ema ? ddp::Checkpointer(ctx, cfg.checkpoint, {model, optimizer, scaler, train_loader, ema})
          : ddp::Checkpointer(ctx, cfg.checkpoint, {model, optimizer, scaler, train_loader});
  const int64_t first_step = checkpointer.restore();
  examples::require_same_epochs(checkpointer, plan.epoch);
  const auto summary = loop.run(checkpointer, first_step);
  const auto hash = examples::common_parameter_hash(model.named_parameters(), ctx.control_plane());
  print_summary(summary, hash, corrupt_images(data, ctx, cfg), ctx, cfg, metrics,
                checkpointer.last_saved_step());
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(
      argc, argv, [](ddp::Context& ctx, const ddp::Config& cfg) { train(ctx, cfg); },
      examples::image_sections());
}
