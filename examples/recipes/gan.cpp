// SPDX-License-Identifier: Apache-2.0
// A generative adversarial network: two models, two optimizers, one checkpoint.
//
//   mpirun -n 2 build/examples/recipes/gan train.max_steps=1000 checkpoint.dir=runs/gan
#include <torch/torch.h>

#include "ddp/ddp.hpp"

namespace {

torch::nn::Sequential make_mlp(int64_t inputs, int64_t outputs, const ddp::Context& ctx) {
  torch::nn::Sequential mlp(torch::nn::Linear(inputs, 64), torch::nn::ReLU(),
                            torch::nn::Linear(64, outputs));
  mlp->to(ctx.device());
  return mlp;
}

torch::Tensor loss_of(const torch::Tensor& logits, double label) {
  return torch::binary_cross_entropy_with_logits(logits, torch::full_like(logits, label));
}

void set_frozen(const torch::nn::Module& module, bool frozen) {
  for (auto& parameter : module.parameters()) {
    parameter.set_requires_grad(!frozen);
  }
}

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  auto options = cfg.ddp;
  options.name = "generator";  // in messages and in checkpoints
  ddp::DistributedDataParallel generator(make_mlp(8, 2, ctx), ctx.communicator(), options);
  options.name = "discriminator";
  ddp::DistributedDataParallel discriminator(make_mlp(2, 1, ctx), ctx.communicator(), options);
  const ddp::OptimizerOptions adam{.type = ddp::OptimizerType::Adam, .beta1 = 0.5};
  auto g_optimizer = ddp::make_optimizer(generator, adam);
  auto d_optimizer = ddp::make_optimizer(discriminator, adam);
  ddp::Checkpointer checkpointer(
      ctx, cfg.checkpoint,
      {generator, {"g_optimizer", g_optimizer}, discriminator, {"d_optimizer", d_optimizer}});
  ddp::Metrics metrics(ctx, cfg.metrics);
  const auto first_step = checkpointer.restore();
  metrics.begin(first_step, cfg.train.max_steps);
  for (auto step = first_step; step < cfg.train.max_steps; ++step) {
    const auto size = cfg.train.batch_size;
    const auto real = 0.1 * torch::randn({size, 2}, ctx.device()) + 2;  // around (2, 2)
    const auto fake = generator.forward(torch::randn({size, 8}, ctx.device()));

    discriminator.zero_grad();
    // One forward for both halves: a backward belongs to one forward of the wrapper.
    const auto logits = discriminator.forward(torch::cat({real, fake.detach()})).chunk(2);
    const auto d_loss = loss_of(logits[0], 1) + loss_of(logits[1], 0);
    d_loss.backward();
    d_optimizer->step(2e-3);

    // On all ranks; it only passes gradients on. Freezing and unfreezing cost a comparison of the
    // ranks each, for which the host waits. With discriminator.no_sync() around this forward and
    // backward there is none.
    set_frozen(*discriminator.module(), true);
    generator.zero_grad();
    const auto g_loss = loss_of(discriminator.forward(fake), 1);
    g_loss.backward();
    g_optimizer->step(2e-3);
    set_frozen(*discriminator.module(), false);

    metrics.log("d_loss", d_loss);
    metrics.log("g_loss", g_loss);
    metrics.log("distance", (fake.mean(0) - real.mean(0)).norm());
    metrics.end_step(step, {.num_samples = size});
    checkpointer.save_if_due(step);
  }
  checkpointer.save(cfg.train.max_steps - 1);
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train);
}
