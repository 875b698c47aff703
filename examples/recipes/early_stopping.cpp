// SPDX-License-Identifier: Apache-2.0
// Training that ends when the evaluation no longer improves, and keeps its best weights.
//
//   mpirun -n 2 build/examples/recipes/early_stopping train.epochs=100
#include <torch/torch.h>

#include "ddp/ddp.hpp"

namespace {

struct StoppingSettings {
  int64_t patience = 3;
  double min_delta = 0;
};
void describe_fields(StoppingSettings& settings, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "patience", .doc = "Epochs without an improvement that end the training."},
                settings.patience);
  visitor.field({.name = "min_delta", .doc = "An improvement is larger than this."},
                settings.min_delta);
}

// Noisy samples of a line: more epochs than it needs only fit the noise.
std::shared_ptr<ddp::TensorDataset> make_samples(int64_t seed) {
  const auto random = torch::make_generator<at::CPUGeneratorImpl>(seed);
  const auto inputs = torch::randn({32, 16}, random);
  const auto noise = 0.5 * torch::randn({32, 1}, random);
  return std::make_shared<ddp::TensorDataset>(inputs, inputs.narrow(1, 0, 1) + noise);
}

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  torch::nn::Linear module(16, 1);
  module->to(ctx.device());
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  auto optimizer = ddp::make_optimizer(model, cfg.optimizer);
  auto samples = make_samples(1), test_samples = make_samples(2);
  ddp::DistributedSampler sampler(samples->size(), ctx.communicator(), cfg.sampler);
  ddp::DistributedSampler test_sampler(test_samples->size(), ctx.communicator(),
                                       ddp::eval_sampler_options(cfg.sampler));
  ddp::DataLoader loader(samples, sampler, ctx.device(), cfg.loader);
  ddp::DataLoader test_loader(test_samples, test_sampler, ctx.device(),
                              ddp::eval_loader_options(cfg.loader));
  ddp::Metrics metrics(ctx, cfg.metrics);
  const auto settings = cfg.section<StoppingSettings>("stopping");
  ddp::EarlyStopping early_stopping(
      ctx, {.patience = settings.patience, .min_delta = settings.min_delta});
  auto options = cfg.checkpoint;
  options.keep_best = ddp::KeepBest::Min;
  ddp::Checkpointer checkpointer(ctx, options, {model, optimizer, loader, early_stopping});

  auto step = checkpointer.restore();
  const auto steps_per_epoch = loader.num_batches();
  const auto num_steps = cfg.train.num_steps(steps_per_epoch);
  metrics.begin(step, num_steps, steps_per_epoch);
  while (step < num_steps && !early_stopping.has_stopped()) {
    const auto batch = loader.next();
    model.zero_grad();
    const auto loss = torch::mse_loss(model.forward(batch.data), batch.target);
    loss.backward();
    optimizer->step(0.1);
    metrics.end_step(step, {.loss = loss, .num_samples = batch.size()});
    checkpointer.save_if_due(step++);
    if (step % steps_per_epoch == 0) {
      {
        const ddp::Metrics::ClockPause pause(metrics);
        const torch::NoGradGuard no_grad;
        for (auto& test : test_loader) {
          metrics.log_epoch("test_loss", torch::mse_loss(module->forward(test.data), test.target),
                            {.weight = static_cast<double>(test.size())});
        }
      }
      const auto epoch = metrics.end_epoch(step / steps_per_epoch - 1);
      const double test_loss = epoch.custom.at("test_loss");  // of all ranks
      early_stopping.should_stop(test_loss);                  // before the save, which holds it
      checkpointer.save(step - 1, test_loss);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train, {ddp::declare_section<StoppingSettings>("stopping")});
}
