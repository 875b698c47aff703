// SPDX-License-Identifier: Apache-2.0
// Steps of a ResNet on one resident random batch: what benchmarks/pytorch_resnet.py measures, here.
//
//   bench_resnet model=resnet50 image_size=224 batch_size=256            one JSON line on rank 0
//   bench_resnet … wrap=compare     world 1: wrapped and plain loop in rounds of one process
//   bench_resnet … step=graph       the whole step captured in one CUDA graph, then replayed
//   bench_resnet … ops=plain optimizer=list     without libddp's own kernels
//   bench_resnet … profile=FILE     afterwards a Chrome trace of a few steps, for step_profile.py
//   bench_resnet … gate=FOLDER      each round waits for a file there: see interleaved.py
//
// dtype is what the model computes in. With param_dtype=fp32 that is autocast; with
// param_dtype=bf16 all parameters but those of normalisation are bfloat16 (float32 masters in the
// optimizer). ms is the median of `rounds` means over `steps` steps, host_ms and host_us wall and
// CPU time in which the host issues a step into an empty queue; peak_mib is device-wide, read after
// the warm-up.
#include <torch/torch.h>

#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "bench_common.hpp"
#include "bench_graph.hpp"
#include "ddp/amp/autocast.hpp"
#include "ddp/ops/cross_entropy.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "models/memory_format.hpp"
#include "models/precision.hpp"
#include "models/resnet.hpp"

namespace {

using bench::Loop;
using bench::Settings;

const Settings::Values kDefaults = {
    {"model", "resnet50"},     {"stem", "imagenet"},    {"image_size", "224"},
    {"batch_size", "256"},     {"dtype", "bf16"},       {"num_classes", "1000"},
    {"channels_last", "true"}, {"bucket_cap_mb", "25"}, {"step", "eager"},
    {"param_dtype", "fp32"},   {"comm_hook", "none"},   {"fp32_grads", "true"},
    {"optimizer", "auto"},     {"ops", "fused"}};

/// ops=plain: ATen's own, as the rows "before" have them.
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

models::ResNet make_model(const Settings& settings, at::Device device) {
  const auto stem = settings.text("stem") == "cifar" ? models::Stem::Cifar : models::Stem::Imagenet;
  auto module =
      models::make_resnet(settings.text("model"), {.num_classes = settings.number("num_classes"),
                                                   .stem = stem,
                                                   .fused_ops = has_fused_ops(settings)});
  module->to(device);
  if (has_bf16_parameters(settings)) {
    models::to_half_but_norms(*module, torch::kBFloat16);
  }
  if (settings.flag("channels_last")) {
    models::to_channels_last(*module);
  }
  return module;
}

ddp::OptimizerOptions sgd(const Settings& settings) {
  ddp::OptimizerOptions options;
  options.implementation = settings.choice<ddp::OptimizerImplementation>(
      "optimizer", {{"auto", ddp::OptimizerImplementation::Auto},
                    {"flat", ddp::OptimizerImplementation::Flat},
                    {"list", ddp::OptimizerImplementation::List}});
  options.weight_decay = 5e-4;
  options.momentum = 0.9;
  options.nesterov = true;
  return options;
}

/// The same step with and without the wrapper around the module.
class Trainers {
 public:
  Trainers(const Settings& settings, ddp::Context& context)
      : settings_(settings),
        context_(context),
        amp_{.dtype = has_bf16_parameters(settings) ? ddp::AmpDtype::Off
                                                    : bench::amp_dtype(settings, "dtype")} {
    const int64_t size = settings.number("image_size");
    const int64_t batch = settings.number("batch_size");
    const auto on_device = torch::TensorOptions().device(context.device());
    images_ = torch::randn({batch, 3, size, size}, on_device);
    if (has_bf16_parameters(settings)) {
      images_ = images_.to(torch::kBFloat16);
    }
    if (settings.flag("channels_last")) {
      images_ = images_.contiguous(at::MemoryFormat::ChannelsLast);
    }
    target_ =
        torch::randint(settings.number("num_classes"), {batch}, on_device.dtype(torch::kLong));
  }

  Loop wrapped() {
    auto module = make_model(settings_, context_.device());
    ddp::DdpOptions options;
    options.bucket_cap_mb = settings_.real("bucket_cap_mb");
    options.comm_hook = settings_.text("comm_hook");
    options.fp32_grads = settings_.flag("fp32_grads");
    auto model = std::make_shared<ddp::DistributedDataParallel<models::ResNet>>(
        module, context_.communicator(), options);
    auto optimizer =
        std::make_shared<ddp::AnyOptimizer>(ddp::make_optimizer(*model, sgd(settings_)));
    return {"ddp",
            [this, model, optimizer] {
              model->zero_grad();
              backward([&] { return model->forward(images_); });
              optimizer->step(0.1);
            },
            {}};
  }

  Loop plain() {
    auto module = make_model(settings_, context_.device());
    ddp::NamedParameters parameters;
    for (const auto& item : module->named_parameters()) {
      parameters.push_back({item.key(), item.value()});
    }
    auto optimizer =
        std::make_shared<ddp::AnyOptimizer>(ddp::make_optimizer(parameters, sgd(settings_)));
    return {"plain",
            [this, module, optimizer]() mutable {
              module->zero_grad();
              backward([&] { return module->forward(images_); });
              optimizer->step(0.1);
            },
            {}};
  }

 private:
  template <typename Forward>
  void backward(const Forward& forward) {
    torch::Tensor loss;
    {
      ddp::Autocast autocast(amp_);
      const auto logits = forward();
      loss = has_fused_ops(settings_)
                 ? ddp::ops::cross_entropy(logits, target_).loss
                 : torch::cross_entropy_loss(logits.to(torch::kFloat32), target_);
    }
    loss.backward();
  }

  const Settings& settings_;
  ddp::Context& context_;
  ddp::AmpOptions amp_;
  torch::Tensor images_;
  torch::Tensor target_;
};

void print_result(const Settings& settings, const ddp::Context& context,
                  const std::vector<Loop>& loops, double peak_mib) {
  for (const auto& loop : loops) {
    const double ms = loop.median_ms();
    const auto samples = static_cast<double>(settings.number("batch_size") * context.world_size());
    std::ostringstream line;
    line << "{\"impl\": \"libddp-" << loop.name << "\", \"model\": \"" << settings.text("model")
         << "\", \"stem\": \"" << settings.text("stem") << "\", \"world\": " << context.world_size()
         << ", \"batch_size\": " << settings.text("batch_size") << ", \"dtype\": \""
         << settings.text("dtype") << "\", \"param_dtype\": \"" << settings.text("param_dtype")
         << "\", \"step\": \"" << settings.text("step") << "\", \"comm_hook\": \""
         << settings.text("comm_hook") << "\", \"ms\": " << ms
         << ", \"img_s\": " << samples / ms * 1000 << ", \"host_ms\": " << loop.host_ms
         << ", \"host_us\": " << loop.host_us << ", \"peak_mib\": " << peak_mib << "}";
    std::cout << line.str() << std::endl;
  }
}

int measure(const Settings& settings) {
  auto context = bench::create_context(settings);
  at::globalContext().setBenchmarkCuDNN(true);
  Trainers trainers(settings, context);
  std::vector<Loop> loops;
  if (settings.text("wrap") != "plain") {
    loops.push_back(trainers.wrapped());
  }
  if (settings.text("wrap") != "ddp") {
    loops.push_back(trainers.plain());
  }
  if (settings.choice<bool>("step", {{"eager", false}, {"graph", true}})) {
    for (auto& loop : loops) {
      loop = bench::captured(std::move(loop), settings, context.device());
    }
  }
  const double peak_mib = bench::measure_rounds(settings, context, loops);
  if (context.is_main()) {
    print_result(settings, context, loops, peak_mib);
  }
  loops.clear();
  context.close();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_main([&] { return measure(Settings("bench_resnet", kDefaults, argc, argv)); });
}
