// SPDX-License-Identifier: Apache-2.0
// Steps of a ResNet on one resident random batch: what benchmarks/pytorch_resnet.py measures, here.
//
//   bench_resnet model=resnet50 image_size=224 batch_size=256            one JSON line on rank 0
//   bench_resnet … wrap=compare     world 1: wrapped and plain loop in interleaved rounds of one
//   process
//   bench_resnet … gate=FOLDER      each round waits for a file there: see compare_resnet.py
//
// ms is the median of `rounds` means over `steps` steps; peak_mib is device-wide, read after the
// steps.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "ddp/amp/autocast.hpp"
#include "ddp/comm/context.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "models/memory_format.hpp"
#include "models/resnet.hpp"

#if DDP_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace {

/// key=value arguments with defaults; an unknown key ends the program.
class Settings {
 public:
  Settings(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string argument = argv[i];
      const auto equals = argument.find('=');
      const auto key = argument.substr(0, equals);
      if (equals == std::string::npos || values_.count(key) == 0) {
        throw ddp::SettingsError("bench_resnet: unknown argument " + argument);
      }
      values_[key] = argument.substr(equals + 1);
    }
  }
  const std::string& text(const std::string& key) const { return values_.at(key); }
  int64_t number(const std::string& key) const { return std::stoll(values_.at(key)); }
  double real(const std::string& key) const { return std::stod(values_.at(key)); }
  bool flag(const std::string& key) const { return text(key) == "true" || text(key) == "1"; }

 private:
  std::map<std::string, std::string> values_ = {{"model", "resnet50"},     {"stem", "imagenet"},
                                                {"image_size", "224"},     {"batch_size", "256"},
                                                {"num_classes", "1000"},   {"dtype", "bf16"},
                                                {"steps", "20"},           {"warmup", "15"},
                                                {"rounds", "5"},           {"wrap", "ddp"},
                                                {"channels_last", "true"}, {"bucket_cap_mb", "25"},
                                                {"device", "auto"},        {"gate", ""},
                                                {"name", "libddp"}};
};

ddp::AmpDtype amp_dtype(const std::string& name) {
  return name == "bf16"   ? ddp::AmpDtype::Bf16
         : name == "fp16" ? ddp::AmpDtype::Fp16
                          : ddp::AmpDtype::Off;
}

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

void synchronize(at::Device device) {
  if (device.is_cuda()) {
    torch::cuda::synchronize();
  }
}

/// Device memory in use by anyone.
double used_mib(at::Device device) {
#if DDP_HAS_CUDA
  if (device.is_cuda()) {
    std::size_t free = 0;
    std::size_t total = 0;
    if (cudaMemGetInfo(&free, &total) == cudaSuccess) {
      return static_cast<double>(total - free) / (1 << 20);
    }
  }
#endif
  static_cast<void>(device);
  return 0;
}

/// A training step and the times of its rounds.
struct Loop {
  std::string name;
  std::function<void()> step;
  std::vector<double> round_ms;

  void run_round(int64_t steps, at::Device device) {
    synchronize(device);
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < steps; ++i) {
      step();
    }
    synchronize(device);
    const std::chrono::duration<double, std::milli> elapsed =
        std::chrono::steady_clock::now() - begin;
    round_ms.push_back(elapsed.count() / static_cast<double>(steps));
  }
  double median_ms() const {
    auto sorted = round_ms;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
};

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
      : settings_(settings), context_(context), amp_{.dtype = amp_dtype(settings.text("dtype"))} {
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
                  const std::vector<Loop>& loops) {
  for (const auto& loop : loops) {
    const double ms = loop.median_ms();
    const auto samples = static_cast<double>(settings.number("batch_size") * context.world_size());
    std::ostringstream line;
    line << "{\"impl\": \"libddp-" << loop.name << "\", \"model\": \"" << settings.text("model")
         << "\", \"stem\": \"" << settings.text("stem") << "\", \"world\": " << context.world_size()
         << ", \"batch_size\": " << settings.text("batch_size") << ", \"dtype\": \""
         << settings.text("dtype") << "\", \"ms\": " << ms << ", \"img_s\": " << samples / ms * 1000
         << ", \"peak_mib\": " << used_mib(context.device()) << "}";
    std::cout << line.str() << std::endl;
  }
}

/// Takes turns with another program, as compare_resnet.py tells through files.
class Gate {
 public:
  Gate(const Settings& settings, const ddp::Context& context)
      : prefix_(settings.text("gate").empty()
                    ? ""
                    : settings.text("gate") + "/" + settings.text("name")),
        context_(context) {}

  void wait_for_turn(int64_t round) const {
    if (prefix_.empty()) {
      return;
    }
    while (!std::filesystem::exists(prefix_ + ".go" + std::to_string(round))) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    context_.communicator()->barrier();
  }

  /// Written aside and renamed, so that it is read whole.
  void answer(const std::string& what, double value) const {
    if (prefix_.empty() || !context_.is_main()) {
      return;
    }
    const auto path = prefix_ + "." + what;
    std::ofstream(path + ".part") << value;
    std::filesystem::rename(path + ".part", path);
  }

 private:
  std::string prefix_;
  const ddp::Context& context_;
};

int measure(const Settings& settings) {
  ddp::ContextOptions options;
  options.device = settings.text("device");
  auto context = ddp::Context::create(options);
  at::globalContext().setBenchmarkCuDNN(true);
  Trainers trainers(settings, context);
  std::vector<Loop> loops;
  if (settings.text("wrap") != "plain") {
    loops.push_back(trainers.wrapped());
  }
  if (settings.text("wrap") != "ddp") {
    loops.push_back(trainers.plain());
  }
  for (auto& loop : loops) {
    for (int64_t i = 0; i < settings.number("warmup"); ++i) {
      loop.step();
    }
  }
  synchronize(context.device());
  const Gate gate(settings, context);
  gate.answer("ready", used_mib(context.device()));
  for (int64_t round = 0; round < settings.number("rounds"); ++round) {
    gate.wait_for_turn(round);
    for (auto& loop : loops) {
      loop.run_round(settings.number("steps"), context.device());
    }
    gate.answer("done" + std::to_string(round), loops.front().round_ms.back());
  }
  if (context.is_main()) {
    print_result(settings, context, loops);
  }
  loops.clear();
  context.close();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return measure(Settings(argc, argv));
  } catch (const ddp::Error& error) {
    std::cerr << error.what() << '\n';
    return static_cast<int>(error.exit_code());
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
