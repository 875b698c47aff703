// SPDX-License-Identifier: Apache-2.0
// Steps of a ResNet or ViT on one resident random batch, measured like benchmarks/pytorch_resnet.py
// and benchmarks/pytorch_vit.py. ResNets are trained with SGD, ViTs with AdamW.
// data=FOLDER uses batches of its images (train/<class>/*.jpg), loaded concurrently.
#include <torch/torch.h>

#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench_common.hpp"
#include "ddp/amp/amp.hpp"
#include "ddp/data/data_loader.hpp"
#include "ddp/detail/text.hpp"
#include "ddp/ops/vision.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/train/graphed_step.hpp"
#include "exported_models.hpp"
#include "models/memory_format.hpp"
#include "models/precision.hpp"
#include "models/resnet.hpp"
#include "models/vit.hpp"

namespace {

constexpr const char* kUsage = R"(usage:
  bench_resnet model=resnet50 image_size=224 batch_size=256            one JSON line on rank 0
  bench_resnet … wrap=compare     world 1: wrapped and plain loop in rounds of one process
  bench_resnet … step=graph       GraphedStep: the whole step captured once, then replayed
  bench_resnet … archive=FILE     a model of torch.export, with fuse=true its chains as ddp::ops
  bench_resnet model=vit_b_16 step=graph param_dtype=bf16 batch_size=128
  bench_resnet … accumulate=4     a step accumulates the batch 4 times
  bench_resnet … ops=plain optimizer=list     without libddp's own kernels
  bench_resnet … data=FOLDER num_workers=16 jpeg_decoder=nvjpeg lead_in=10
                                     each round begins with an empty ring
  bench_resnet … data=FOLDER step=load    loads batches alone, without a model
  bench_resnet … profile=FILE     afterwards a Chrome trace of a few steps, for step_profile.py;
                                  one per rank if FILE holds {rank}
  bench_resnet … gate=FOLDER      each round waits for a file there: see interleaved.py

dtype is the dtype of the computation. With param_dtype=fp32 it uses autocast. With
param_dtype=bf16 all parameters except those of BatchNorm are bfloat16 (float32 masters in the
optimizer). ms is the median of `rounds` means over `steps` steps. host_ms and host_us are
the wall and CPU time in which the host issues a step into an empty queue. exposed_comm_ms is the
median of the rounds' last steps, on the rank that waits longest. peak_mib is device-wide, read
after the warm-up.
)";

using bench::Loop;
using bench::Settings;

const Settings::Values kDefaults = {{"model", "resnet50"},     {"stem", "imagenet"},
                                    {"image_size", "224"},     {"batch_size", "256"},
                                    {"dtype", "bf16"},         {"num_classes", "1000"},
                                    {"channels_last", "true"}, {"bucket_cap_mb", "25"},
                                    {"step", "eager"},         {"param_dtype", "fp32"},
                                    {"comm_hook", "none"},     {"fp32_grads", "true"},
                                    {"optimizer", "auto"},     {"ops", "fused"},
                                    {"side_streams", "true"},  {"data", ""},
                                    {"num_workers", "14"},     {"jpeg_decoder", "cpu"},
                                    {"powersgd_rank", "1"},    {"accumulate", "1"},
                                    {"archive", ""},           {"fuse", "false"}};

/// False for ops=plain: ATen's ops, as in the "before" rows.
bool has_fused_ops(const Settings& settings) {
  return settings.choice<bool>("ops", {{"plain", false}, {"fused", true}});
}

bool has_bf16_parameters(const Settings& settings) {
  const bool bf16 = settings.choice<bool>("param_dtype", {{"fp32", false}, {"bf16", true}});
  if (bf16 && settings.text("dtype") != "bf16") {
    throw ddp::SettingsError("bench_resnet: param_dtype=bf16 with dtype=" + settings.text("dtype") +
                             "; fix: dtype=bf16, or param_dtype=fp32");
  }
  return bf16;
}

bool has_side_streams(const Settings& settings) {
  return has_fused_ops(settings) && settings.flag("side_streams");
}

bool is_vit(const Settings& settings) {
  return settings.text("model").starts_with("vit_");
}

models::ResNet make_resnet(const Settings& settings, const ddp::Context& context) {
  const auto stem = settings.text("stem") == "cifar" ? models::Stem::Cifar : models::Stem::Imagenet;
  auto module =
      models::make_resnet(settings.text("model"), {.num_classes = settings.number("num_classes"),
                                                   .stem = stem,
                                                   .fused_ops = has_fused_ops(settings),
                                                   .side_streams = has_side_streams(settings)});
  module->to(context.device());
  if (has_bf16_parameters(settings)) {
    models::to_half_but_norms(*module, torch::kBFloat16);
  }
  if (settings.flag("channels_last")) {
    models::to_channels_last(*module);
  }
  return module;
}

models::Vit make_vit(const Settings& settings, const ddp::Context& context) {
  if (!has_fused_ops(settings)) {
    throw ddp::SettingsError("bench_resnet: ops=plain with model=" + settings.text("model") +
                             ": only ResNets have it; fix: ops=fused");
  }
  auto options = models::vit_options(settings.text("model"));
  options.image_size = settings.number("image_size");
  options.num_classes = settings.number("num_classes");
  const auto dtype = has_bf16_parameters(settings) ? torch::kBFloat16 : torch::kFloat32;
  return models::Vit(options, torch::device(context.device()).dtype(dtype));
}

/// The model that setting `model` names.
class ClassifierImpl : public torch::nn::Module {
 public:
  ClassifierImpl(const Settings& settings, const ddp::Context& context) {
    if (!settings.text("archive").empty()) {
      exported_ = register_module("exported", bench::exported_module(settings, context.device()));
      if (settings.flag("channels_last")) {
        models::to_channels_last(*exported_);
      }
    } else if (is_vit(settings)) {
      vit_ = register_module("vit", make_vit(settings, context));
    } else {
      resnet_ = register_module("resnet", make_resnet(settings, context));
    }
  }
  torch::Tensor forward(const torch::Tensor& images) {
    if (exported_) {
      return bench::logits_of(exported_->forward({images}));
    }
    return vit_ ? vit_->forward(images) : resnet_->forward(images);
  }

 private:
  models::ResNet resnet_{nullptr};
  models::Vit vit_{nullptr};
  ddp::ExportedModule exported_{nullptr};
};
TORCH_MODULE(Classifier);

ddp::OptimizerOptions optimizer_options(const Settings& settings) {
  ddp::OptimizerOptions options;
  options.implementation =
      settings.library("optimizer.implementation", "optimizer").optimizer.implementation;
  if (is_vit(settings)) {
    options.type = ddp::OptimizerType::AdamW;
    options.weight_decay = 0.05;
  } else {
    options.weight_decay = 5e-4;
    options.momentum = 0.9;
    options.nesterov = true;
  }
  return options;
}

struct ImageBatch {
  torch::Tensor images;
  torch::Tensor target;
};
void for_each_tensor(ImageBatch& batch, const ddp::TensorVisitor& visit) {
  visit(batch.images);
  visit(batch.target);
}

ImageBatch random_batch(const Settings& settings, at::Device device) {
  const int64_t size = settings.number("image_size");
  const int64_t batch = settings.number("batch_size");
  // The same dtype as the loader's images.
  const bool bf16 = bench::amp_dtype(settings, "dtype") == ddp::AmpDtype::Bf16;
  const auto dtype = bf16 ? torch::kBFloat16 : torch::kFloat32;
  const auto format = settings.flag("channels_last") ? at::MemoryFormat::ChannelsLast
                                                     : at::MemoryFormat::Contiguous;
  return {torch::randn({batch, 3, size, size}, device).to(dtype).contiguous(format),
          torch::randint(settings.number("num_classes"), {batch},
                         torch::TensorOptions().device(device).dtype(torch::kLong))};
}

/// Loads setting `data`: random-resized-crops in the dtype of the computation.
std::unique_ptr<ddp::DataLoader<>> make_loader(const Settings& settings,
                                               const ddp::Context& context) {
  const auto dataset = ddp::make_dataset({.path = settings.text("data"),
                                          .image_size = settings.number("image_size"),
                                          .augment = ddp::Augment::RandomResizedCrop,
                                          .channels_last = settings.flag("channels_last"),
                                          .cache = ddp::CachePolicy::Off});
  const bool bf16 = bench::amp_dtype(settings, "dtype") == ddp::AmpDtype::Bf16;
  return std::make_unique<ddp::DataLoader<>>(
      dataset, ddp::DistributedSampler(dataset->size(), context.communicator()), context.device(),
      ddp::LoaderOptions{
          .batch_size = settings.number("batch_size"),
          .num_workers = settings.number("num_workers"),
          .drop_last = true,
          .jpeg_decoder =
              settings.library("loader.jpeg_decoder", "jpeg_decoder").loader.jpeg_decoder,
          .image_dtype = bf16 ? ddp::ImageDtype::Bf16 : ddp::ImageDtype::Fp32});
}

/// A model with its optimizer, with or without the wrapper.
class Trainer {
 public:
  Trainer(const Settings& settings, ddp::Context& context, bool wrapped)
      : settings_(settings),
        amp_{.dtype = has_bf16_parameters(settings) ? ddp::AmpDtype::Off
                                                    : bench::amp_dtype(settings, "dtype")},
        module_(settings, context),
        lr_(is_vit(settings) ? 1e-3 : 0.1) {
    if (settings.text("data").empty()) {
      batch_ = random_batch(settings, context.device());
    } else {
      loader_ = make_loader(settings, context);
    }
    if (wrapped) {
      model_ =
          std::make_unique<Model>(module_, context.communicator(), bench::ddp_options(settings));
      optimizer_ = ddp::make_optimizer(*model_, optimizer_options(settings));
    } else {
      ddp::NamedParameters parameters;
      for (const auto& item : module_->named_parameters()) {
        parameters.push_back({item.key(), item.value()});
      }
      optimizer_ = ddp::make_optimizer(parameters, optimizer_options(settings));
    }
    if (settings.choice<bool>("step", {{"eager", false}, {"graph", true}, {"load", false}})) {
      capture(context);
    }
  }

  void step() {
    if (loader_) {
      auto [images, target] = loader_->next();
      batch_ = {std::move(images), std::move(target)};
    }
    if (graphed_) {
      (*graphed_)(batch_, {.lr = lr_, .step = num_steps_++});
    } else {
      run(batch_, {.lr = lr_, .step = num_steps_++});
    }
  }
  /// Exposed time of the last step; an empty function if nothing is reduced.
  std::function<double()> last_exposed_ms() const {
    if (!model_) {
      return {};
    }
    return [this] { return model_->exposed_communication_ms(); };
  }

 private:
  using Model = ddp::DistributedDataParallel<Classifier>;
  using Step = std::function<torch::Tensor(const ImageBatch&, const ddp::StepScalars&)>;

  torch::Tensor forward(const ImageBatch& batch) {
    ddp::Autocast autocast(amp_);
    const auto logits = model_ ? model_->forward(batch.images) : module_->forward(batch.images);
    return has_fused_ops(settings_)
               ? ddp::ops::cross_entropy(logits, batch.target).loss
               : torch::cross_entropy_loss(logits.to(torch::kFloat32), batch.target);
  }

  torch::Tensor run(const ImageBatch& batch, const ddp::StepScalars& scalars) {
    if (model_) {
      model_->zero_grad();
    } else {
      module_->zero_grad();
    }
    torch::Tensor loss;
    const auto batches = settings_.number("accumulate");
    for (int64_t i = 0; i < batches; ++i) {
      std::optional<ddp::NoSync> no_sync;
      if (model_ && i + 1 < batches) {
        no_sync.emplace(*model_);
      }
      loss = forward(batch);
      (batches > 1 ? loss / batches : loss).backward();
    }
    optimizer_->step(scalars);
    return loss.detach();
  }

  void capture(ddp::Context& context) {
    ddp::GraphedParts parts;
    parts.optimizers = {optimizer_.get()};
    if (model_) {
      parts.models = {model_.get()};
    }
    graphed_ = std::make_unique<ddp::GraphedStep<ImageBatch, torch::Tensor>>(
        context, parts, Step([this](const ImageBatch& batch, const ddp::StepScalars& scalars) {
          return run(batch, scalars);
        }),
        ddp::GraphedStepOptions{.mode = ddp::CudaGraph::On});
  }

  const Settings& settings_;
  ddp::AmpOptions amp_;
  ImageBatch batch_;
  std::unique_ptr<ddp::DataLoader<>> loader_;
  Classifier module_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<ddp::Optimizer> optimizer_;
  std::unique_ptr<ddp::GraphedStep<ImageBatch, torch::Tensor>> graphed_;
  double lr_;
  int64_t num_steps_ = 0;
};

void print_result(const Settings& settings, const ddp::Context& context,
                  const std::vector<Loop>& loops, double peak_mib) {
  for (const auto& loop : loops) {
    const double ms = loop.median_ms();
    const auto samples = static_cast<double>(settings.number("batch_size") * context.world_size() *
                                             settings.number("accumulate"));
    ddp::detail::TextStream line;
    line << "{\"impl\": \"libddp-" << loop.name << "\", \"model\": \"" << settings.text("model")
         << "\", \"stem\": \"" << settings.text("stem") << "\", \"world\": " << context.world_size()
         << ", \"batch_size\": " << settings.text("batch_size") << ", \"dtype\": \""
         << settings.text("dtype") << "\", \"param_dtype\": \"" << settings.text("param_dtype")
         << "\", \"step\": \"" << settings.text("step") << "\", \"comm_hook\": \""
         << settings.text("comm_hook") << "\", \"ms\": " << ms
         << ", \"img_s\": " << samples / ms * 1000 << ", \"host_ms\": " << loop.host_ms
         << ", \"host_us\": " << loop.host_us << ", \"peak_mib\": " << peak_mib;
    if (loop.last_exposed_ms) {
      line << ", \"exposed_comm_ms\": " << loop.exposed_ms;
    }
    line << "}";
    std::cout << line.str() << std::endl;
  }
}

/// step=load
int measure_loader(const Settings& settings, const ddp::Context& context) {
  if (settings.text("data").empty()) {
    throw ddp::SettingsError("bench_resnet: step=load without data; fix: data=FOLDER");
  }
  const auto loader = make_loader(settings, context);
  std::vector<Loop> loops{{"load", [&loader] { (void)loader->next(); }, {}}};
  const double peak_mib = bench::measure_rounds(settings, context, loops);
  if (context.is_main()) {
    print_result(settings, context, loops, peak_mib);
  }
  return 0;
}

int measure(const Settings& settings) {
  auto context = bench::create_context(settings);
  if (settings.text("step") == "load") {
    const int code = measure_loader(settings, context);
    context.close();
    return code;
  }
  at::globalContext().setBenchmarkCuDNN(true);
  std::vector<std::unique_ptr<Trainer>> trainers;
  std::vector<Loop> loops;
  for (const bool wrapped : {true, false}) {
    if (settings.text("wrap") != (wrapped ? "plain" : "ddp")) {
      trainers.push_back(std::make_unique<Trainer>(settings, context, wrapped));
      auto* trainer = trainers.back().get();
      loops.push_back({wrapped ? "ddp" : "plain", [trainer] { trainer->step(); }, {}});
      loops.back().is_graph = settings.text("step") == "graph";
      loops.back().last_exposed_ms = trainer->last_exposed_ms();
    }
  }
  const double peak_mib = bench::measure_rounds(settings, context, loops);
  if (context.is_main()) {
    print_result(settings, context, loops, peak_mib);
  }
  loops.clear();
  trainers.clear();
  context.close();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_main(argc, argv, kUsage + Settings::describe(kDefaults),
                         [&] { return measure(Settings("bench_resnet", kDefaults, argc, argv)); });
}
