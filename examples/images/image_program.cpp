// SPDX-License-Identifier: Apache-2.0
#include "images/image_program.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <iostream>
#include <utility>

#include "common/evaluation_scope.hpp"
#include "common/run_plan.hpp"
#include "common/sample_trainer.hpp"
#include "ddp/data/image_files.hpp"
#include "ddp/detail/text.hpp"

namespace examples {
namespace {

constexpr const char* kClassify = "classify";
constexpr int64_t kMostClasses = 5;  // that are shown for an image

/// Moves the arguments that are neither options, their values nor settings to `files`.
std::vector<const char*> take_files(int argc, const char* const* argv,
                                    std::vector<std::string>& files) {
  std::vector<const char*> others(argv, argv + std::min(argc, 1));
  bool is_value = false;  // of the option before it
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (!is_value && !argument.starts_with('-') && argument.find('=') == std::string::npos) {
      files.push_back(argument);
    } else {
      others.push_back(argv[i]);
    }
    // A word after --help is its topic, an option after it is not.
    const bool takes_word = argument == "--help" || argument == "-h";
    const bool takes_value = argument == "--config" || argument == "--completion";
    is_value = (!is_value || argument.starts_with('-')) && (takes_word || takes_value);
  }
  return others;
}

void require_files(const ImageRun& run) {
  if (run.mode == kClassify && run.files.empty()) {
    throw ddp::SettingsError(
        "run.mode=classify, but no image file is given; fix: name image files behind it, as in "
        "run.mode=classify cat.jpg dog.png");
  }
  if (run.mode != kClassify && !run.files.empty()) {
    throw ddp::SettingsError(
        ddp::concat("argument '", run.files.front().substr(0, 120),
                    "' is not key=value, and run.mode=", run.mode,
                    " takes no image files; fix: set run.mode=classify to classify them, or write "
                    "settings as in train.batch_size=128"));
  }
}

/// Returns float64 [files, 2, k] on the CPU, equal on all ranks: the largest probabilities of each
/// file, and their classes.
at::Tensor most_probable(ddp::Context& ctx, const ddp::Config& cfg, const ImageModel& classifier,
                         const std::shared_ptr<ddp::Dataset>& images, int64_t k) {
  ddp::DistributedSampler sampler(images->size(), ctx.communicator(),
                                  ddp::eval_sampler_options(cfg.sampler));
  ddp::DataLoader loader(images, sampler, ctx.device(), eval_loader_options(cfg));
  auto result =
      torch::zeros({images->size(), 2, k}, at::TensorOptions(ctx.device()).dtype(torch::kFloat64));
  ddp::StopPoll poll(ctx, cfg.checkpoint.stop_check_seconds, "classification");
  for (auto& batch : loader) {
    const auto logits = classifier.forward(batch.data).to(torch::kFloat64);
    const auto [probabilities, classes] = torch::softmax(logits, 1).topk(k, 1);
    result.index_copy_(0, batch.target,
                       torch::stack({probabilities, classes.to(torch::kFloat64)}, 1));
    if (poll.should_stop()) {
      break;
    }
  }
  if (poll.finish()) {
    throw ddp::Stop(poll.stop_reason() + ": stopped while classifying images");
  }
  ctx.communicator()->all_reduce(result)->wait();  // each file's row is zero on the other ranks
  return result.to(torch::kCPU);
}

void classify(ddp::Context& ctx, const ddp::Config& cfg, const std::vector<std::string>& files,
              const ImageData& data, const ImageModel& classifier) {
  const auto images = ddp::open_image_files(data.options, files);
  const auto ema = make_ema(classifier.model, classifier.ema_decay);
  const auto weights = restore_trained(ctx, cfg, classifier.model, ema, classifier.weights);
  const int64_t k = std::min(kMostClasses, data.train->num_classes());
  const EvaluationScope scope(classifier.model, classifier.module, ema.get(), cfg.amp);
  const auto result = most_probable(ctx, cfg, classifier, images, k);
  if (!ctx.is_main()) {
    return;
  }
  ddp::detail::TextStream out;
  out << "\nclassified by   " << weights << (ema ? kByAverages : "") << '\n';
  for (std::size_t file = 0; file < files.size(); ++file) {
    const auto* const row = result.const_data_ptr<double>() + static_cast<int64_t>(file) * 2 * k;
    out << ddp::detail::printable(files[file]) << '\n';
    for (int64_t i = 0; i < k; ++i) {
      out << format("  %6.2f %%  ", 100 * row[i])
          << class_name(data, static_cast<int64_t>(row[k + i])) << '\n';
    }
  }
  std::cout << out.str() << std::flush;
}

}  // namespace

void describe_fields(ImageRun& run, ddp::FieldVisitor& v) {
  v.field({.name = "mode",
           .doc = "train: train and evaluate. evaluate: only report loss and accuracy, in all and "
                  "per class, of the newest checkpoint, or of model.weights if checkpoint.dir is "
                  "empty. classify: print the five most probable classes of each image file on "
                  "the command line, as in run.mode=classify cat.jpg dog.png.",
           .choices = {"train", "evaluate", kClassify},
           .common = true},
          run.mode);
}

std::vector<ddp::Section> image_sections(ddp::Section model) {
  // A run that classifies makes no optimizer, learning rates or metrics.
  return {ddp::declare_section<ImageRun>("run", "Train, evaluate, or classify image files."),
          std::move(model), ddp::uses({"train", "optimizer", "lr_schedule", "metrics"})};
}

int run_image_program(int argc, const char* const* argv, const ImageFunction& function,
                      const std::vector<ddp::Section>& sections) {
  std::vector<std::string> files;
  const auto others = take_files(argc, argv, files);
  return ddp::run(
      static_cast<int>(others.size()), others.data(),
      [&](ddp::Context& ctx, const ddp::Config& cfg) {
        auto run = cfg.section<ImageRun>("run");
        run.files = files;
        require_files(run);
        function(ctx, cfg, run);
      },
      sections);
}

void run_images(ddp::Context& ctx, const ddp::Config& cfg, const ImageRun& run,
                const ImageData& data, const ImageModel& classifier, const ImageProgram& program) {
  if (run.mode == kClassify) {
    classify(ctx, cfg, run.files, data, classifier);
  } else {
    train_images(ctx, cfg, data, classifier, program, run.mode == "evaluate");
  }
}

}  // namespace examples
