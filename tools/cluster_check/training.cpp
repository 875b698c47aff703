// SPDX-License-Identifier: Apache-2.0
// Training as users run it: the reference encoder in float32 and bf16, and a ResNet.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <tuple>

#include "ddp/detail/text.hpp"
#include "ddp/ops/vision.hpp"
#include "ddp/optim/make_optimizer.hpp"
#include "ddp/reduce/distributed_data_parallel.hpp"
#include "ddp/train/graphed_step.hpp"
#include "models/encoder.hpp"
#include "models/memory_format.hpp"
#include "models/precision.hpp"
#include "models/resnet.hpp"
#include "run.hpp"
#include "stopwatch.hpp"

namespace cluster_check {
namespace {

constexpr int kWarmUpSteps = 10;  // includes the capture
constexpr int kTrialSteps = 10;

using Batch = std::tuple<torch::Tensor, torch::Tensor>;

/// A model, its optimizer and its step, captured on a GPU.
template <typename Module>
class Trainer {
 public:
  using Loss = std::function<torch::Tensor(ddp::DistributedDataParallel<Module>&, const Batch&)>;

  Trainer(ddp::Context& context, Module module, const ddp::OptimizerOptions& rule, double lr,
          Batch batch, Loss loss)
      : model_(std::move(module), context.communicator(), {.fp32_grads = false}),
        optimizer_(ddp::make_optimizer(model_, rule)),
        batch_(std::move(batch)),
        loss_(std::move(loss)),
        lr_(lr),
        step_(context, {.models = {&model_}, .optimizers = {optimizer_.get()}},
              [this](const Batch& b, const ddp::StepScalars& scalars) {
                model_.zero_grad();
                const auto value = loss_(model_, b);
                value.backward();
                optimizer_->step(scalars);
                return value.detach();
              },
              {.mode = context.device().is_cuda() ? ddp::CudaGraph::On : ddp::CudaGraph::Off}) {}

  void run(int64_t steps) {
    for (int64_t i = 0; i < steps; ++i) {
      result_ = step_(batch_, {.lr = lr_, .step = num_steps_++}).outputs;
    }
  }
  /// The host waits.
  double last_loss() const { return result_.template item<double>(); }

 private:
  ddp::DistributedDataParallel<Module> model_;
  std::unique_ptr<ddp::Optimizer> optimizer_;
  Batch batch_;
  Loss loss_;
  double lr_;
  int64_t num_steps_ = 0;
  torch::Tensor result_;
  ddp::GraphedStep<Batch, torch::Tensor> step_;
};

/// Milliseconds of `steps` steps.
template <typename T>
double time_steps(Run& run, T& trainer, int64_t steps) {
  Stopwatch watch(run.context.device());
  run.context.communicator()->barrier();
  watch.start();
  trainer.run(steps);
  watch.stop();
  return watch.milliseconds();
}

/// Adds the row of samples per second and rank. Trains `steps` steps, or about `seconds`. Returns
/// whether the loss fell.
template <typename T>
bool measure(Run& run, T& trainer, const char* name, const char* unit, double samples_per_step,
             int64_t steps, double seconds) {
  trainer.run(1);
  const double first_loss = trainer.last_loss();
  trainer.run(kWarmUpSteps - 1);
  if (steps == 0) {
    const double trial_ms = time_steps(run, trainer, kTrialSteps) / kTrialSteps;
    const auto own = static_cast<int64_t>(std::ceil(seconds * 1000 / trial_ms));
    for (const auto& numbers : run.context.control_plane().all_gather_numbers({own})) {
      steps = std::max(steps, numbers[0]);
    }
  }
  const double ms = time_steps(run, trainer, steps);
  ddp::detail::TextStream text;
  text.precision(4);
  const double last_loss = trainer.last_loss();
  text << steps << (steps == 1 ? " step of " : " steps of ") << ms / static_cast<double>(steps)
       << " ms, loss " << first_loss << " to " << last_loss;
  run.add("training", name, samples_per_step * static_cast<double>(steps) * 1000 / ms, unit,
          text.str(), run.context.rank());
  return std::isfinite(last_loss) && last_loss < first_loss;
}

bool check_encoder(Run& run, const char* name, torch::Dtype dtype) {
  run.begin(name);
  const auto device = run.context.device();
  models::EncoderOptions sizes;
  int64_t batch_size = 8, seq_len = 512;
  if (!run.on_gpu()) {
    sizes = {
        .vocab_size = 512, .max_positions = 32, .hidden_size = 64, .num_layers = 2, .num_heads = 4};
    batch_size = 2;
    seq_len = 32;
  }
  at::manual_seed(0);
  models::Encoder module(sizes, torch::TensorOptions().device(device).dtype(dtype));
  auto generator = at::detail::createCPUGenerator(1 + static_cast<uint64_t>(run.context.rank()));
  const auto ids =
      torch::randint(sizes.vocab_size, {batch_size, seq_len}, generator, torch::kInt64).to(device);
  const double tokens = static_cast<double>(batch_size * seq_len);
  Trainer<models::Encoder> trainer(
      run.context, module, {.type = ddp::OptimizerType::AdamW, .weight_decay = 0.01}, 1e-4,
      {ids, ids}, [tokens](auto& model, const Batch& batch) {
        const models::TokenInput input{.input_ids = std::get<0>(batch)};
        return model.forward(input, std::get<1>(batch)).loss_sum / tokens;
      });
  return run.on_gpu()
             ? measure(run, trainer, name, "tokens/s", tokens, run.options.quick ? 100 : 0, 5)
             : measure(run, trainer, name, "tokens/s", tokens, run.options.quick ? 20 : 0, 0.3);
}

bool check_resnet(Run& run) {
  run.begin("resnet");
  const auto device = run.context.device();
  const bool on_gpu = run.on_gpu();
  const int64_t batch_size = on_gpu ? 256 : 4, image_size = on_gpu ? 224 : 32;
  at::manual_seed(0);
  auto module = on_gpu ? models::resnet50({.side_streams = true})
                       : models::resnet18({.num_classes = 10, .stem = models::Stem::Cifar});
  module->to(device);
  auto images = torch::randn({batch_size, 3, image_size, image_size}, device);
  if (on_gpu) {
    models::to_half_but_norms(*module, torch::kBFloat16);
    images = images.to(torch::kBFloat16);
  }
  models::to_channels_last(*module);
  images = images.contiguous(at::MemoryFormat::ChannelsLast);
  const auto labels =
      torch::randint(10, {batch_size}, torch::TensorOptions().device(device).dtype(torch::kLong));
  Trainer<models::ResNet> trainer(
      run.context, module, {.momentum = 0.9}, 0.01, {images, labels},
      [](auto& model, const Batch& batch) {
        return ddp::ops::cross_entropy(model.forward(std::get<0>(batch)), std::get<1>(batch)).loss;
      });
  return measure(run, trainer, "resnet", "images/s", static_cast<double>(batch_size), 0,
                 on_gpu ? 30 : 1);
}

}  // namespace

void check_training(Run& run) {
  at::globalContext().setBenchmarkCuDNN(true);
  at::globalContext().setAllowTF32CuBLAS(false);  // float32 is strict
  int not_learning = 0;
  if (!run.options.quick) {
    not_learning += !check_encoder(run, "encoder_fp32", torch::kFloat32);
  }
  not_learning += !check_encoder(run, "encoder_bf16", torch::kBFloat16);
  if (!run.options.quick) {
    not_learning += !check_resnet(run);
  }
  run.add("training", "not_learning", not_learning, "", "", run.context.rank());
}

}  // namespace cluster_check
