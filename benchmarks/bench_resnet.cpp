// SPDX-License-Identifier: Apache-2.0
// Steps of a ResNet on one resident random batch: what benchmarks/pytorch_resnet.py measures, here.
//
//   bench_resnet model=resnet50 image_size=224 batch_size=256            one JSON line on rank 0
//   bench_resnet … wrap=compare     world 1: wrapped and plain loop in rounds of one process
//   bench_resnet … gate=FOLDER      each round waits for a file there: see compare.py
//
// ms is the median of `rounds` means over `steps` steps; peak_mib is device-wide, read after the
// warm-up.
#include <torch/torch.h>

#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "bench_common.hpp"
#include "ddp/amp/autocast.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "models/memory_format.hpp"
#include "models/resnet.hpp"

namespace {

using bench::Loop;
using bench::Settings;

const Settings::Values kDefaults = {{"model", "resnet50"},     {"stem", "imagenet"},
                                    {"image_size", "224"},     {"batch_size", "256"},
                                    {"dtype", "bf16"},         {"num_classes", "1000"},
                                    {"channels_last", "true"}, {"bucket_cap_mb", "25"}};

models::ResNet make_model(const Settings& settings, at::Device device) {
  const auto stem = settings.text("stem") == "cifar" ? models::Stem::Cifar : models::Stem::Imagenet;
  auto module = models::make_resnet(settings.text("model"),
                                    {.num_classes = settings.number("num_classes"), .stem = stem});
  module->to(device);
  if (settings.flag("channels_last")) {
    models::to_channels_last(*module);
  }
  return module;
}

ddp::OptimizerOptions sgd() {
  ddp::OptimizerOptions options;
  options.weight_decay = 5e-4;
  options.momentum = 0.9;
  options.nesterov = true;
  return options;
}

/// The same step with and without the wrapper around the module.
class Trainers {
 public:
  Trainers(const Settings& settings, ddp::Context& context)
      : settings_(settings), context_(context), amp_{.dtype = bench::amp_dtype(settings, "dtype")} {
    const int64_t size = settings.number("image_size");
    const int64_t batch = settings.number("batch_size");
    const auto on_device = torch::TensorOptions().device(context.device());
    images_ = torch::randn({batch, 3, size, size}, on_device);
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
    auto model = std::make_shared<ddp::DistributedDataParallel<models::ResNet>>(
        module, context_.communicator(), options);
    auto optimizer = std::make_shared<ddp::AnyOptimizer>(ddp::make_optimizer(*model, sgd()));
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
    auto optimizer = std::make_shared<ddp::AnyOptimizer>(ddp::make_optimizer(parameters, sgd()));
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
      loss = torch::cross_entropy_loss(forward(), target_);
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
         << settings.text("dtype") << "\", \"ms\": " << ms << ", \"img_s\": " << samples / ms * 1000
         << ", \"peak_mib\": " << peak_mib << "}";
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
