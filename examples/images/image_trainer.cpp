// SPDX-License-Identifier: Apache-2.0
#include "images/image_trainer.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <iostream>
#include <string>
#include <utility>

#include "common/data_path.hpp"
#include "common/run_plan.hpp"
#include "common/sample_trainer.hpp"
#include "ddp/detail/text.hpp"
#include "images/image_task.hpp"

namespace examples {
namespace {

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

/// Lines with the accuracy of up to 20 classes, or of the three worst ones. `counts` is
/// ImageParts::class_counts. Collective.
std::string class_lines(at::Tensor counts, const ImageData& data, ddp::Context& ctx) {
  constexpr std::size_t kAll = 20, kWorst = 3;
  ctx.communicator()->all_reduce(counts)->wait();
  counts = counts.to(torch::kCPU);
  struct Row {
    double share;
    int64_t number, num_images;
  };
  std::vector<Row> rows;
  for (int64_t i = 0; i < counts.size(1); ++i) {
    const auto correct = counts[0][i].item<int64_t>(), all = counts[1][i].item<int64_t>();
    if (all > 0) {
      rows.push_back({static_cast<double>(correct) / static_cast<double>(all), i, all});
    }
  }
  const bool shows_all = rows.size() <= kAll;
  if (!shows_all) {
    std::stable_sort(rows.begin(), rows.end(),
                     [](const Row& a, const Row& b) { return a.share < b.share; });
    rows.resize(kWorst);
  }
  std::string text;
  for (const auto& [share, number, num_images] : rows) {
    text += format("%-16s%6.2f %% of %lld  ",
                   !text.empty() ? ""
                   : shows_all   ? "classes"
                                 : "worst",
                   100 * share, static_cast<long long>(num_images)) +
            class_name(data, number) + '\n';
  }
  return text;
}

}  // namespace

ImageData open_image_data(ddp::DataOptions options, bool channels_last) {
  options.path = find_data_path(options.path);
  options.channels_last = channels_last;
  ImageData data{ddp::make_dataset(options, ddp::Split::Train),
                 ddp::make_dataset(options, ddp::Split::Test), options};
  require_same_classes(*data.train, *data.test);
  return data;
}

std::string class_name(const ImageData& data, int64_t number) {
  const auto names = data.train->class_names();
  return number < std::ssize(names)
             ? ddp::detail::printable(names[static_cast<std::size_t>(number)])
             : ddp::concat("class ", number);
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
                  const ImageModel& classifier, const ImageProgram& program, bool only_evaluates) {
  ddp::DistributedSampler sampler(data.train->size(), ctx.communicator(), cfg.sampler);
  ddp::DataLoader train_loader(data.train, sampler, ctx.device(), cfg.loader);
  ddp::DistributedSampler eval_sampler(data.test->size(), ctx.communicator(),
                                       ddp::eval_sampler_options(cfg.sampler));
  ddp::DataLoader eval_loader(data.test, eval_sampler, ctx.device(), eval_loader_options(cfg));

  cfg.metrics.run.sample_unit = "images";
  only_evaluates = only_evaluates || cfg.checkpoint.resume == ddp::Resume::Best;
  at::Tensor class_counts;
  if (only_evaluates && !classifier.own_loss) {
    class_counts = torch::zeros({2, data.train->num_classes()},
                                at::TensorOptions(ctx.device()).dtype(torch::kInt64));
  }
  ImageTask task({.forward = classifier.forward,
                  .train_loader = train_loader,
                  .eval_loader = eval_loader,
                  .own_loss = classifier.own_loss,
                  .class_counts = class_counts},
                 {.mix = {.mixup = cfg.train.mixup,
                          .cutmix = cfg.train.cutmix,
                          .seed = static_cast<uint64_t>(cfg.sampler.seed),
                          .rank = ctx.rank()},
                  .label_smoothing = cfg.train.label_smoothing,
                  .weighted = has_uneven_batches(cfg, ctx)});
  const auto run = train_samples(ctx, cfg,
                                 {.model = classifier.model,
                                  .module = classifier.module,
                                  .ema_decay = classifier.ema_decay,
                                  .weights = classifier.weights,
                                  .only_evaluates = only_evaluates,
                                  .save_trained = classifier.save_trained},
                                 train_loader, task);
  const auto classes = class_counts.defined() ? class_lines(class_counts, data, ctx) : "";
  const auto more = classes + corrupt_images(data, ctx, cfg);
  if (ctx.is_main()) {
    std::cout << sample_report(run, "images", more, ctx, cfg)
              << (only_evaluates ? "" : "next            " + next_command(program, cfg, ctx) + '\n')
              << std::flush;
  }
}

}  // namespace examples
