// SPDX-License-Identifier: Apache-2.0
// Several micro-batches for each optimizer step. Gradients are sent once, with the last of them.
//
//   mpirun -n 2 build/examples/recipes/gradient_accumulation train.grad_accum_steps=4
#include <torch/torch.h>

#include <optional>

#include "ddp/ddp.hpp"

namespace {

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  torch::nn::Sequential module(torch::nn::Flatten(), torch::nn::Linear(3 * 32 * 32, 10));
  module->to(ctx.device());
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  auto optimizer = ddp::make_optimizer(model, cfg.optimizer);
  auto dataset = ddp::make_dataset(cfg.data);
  ddp::DistributedSampler sampler(dataset->size(), ctx.communicator(), cfg.sampler);
  ddp::DataLoader loader(dataset, sampler, ctx.device(), cfg.loader);

  const auto num_micro_batches = cfg.train.grad_accum_steps;
  const auto num_steps = cfg.train.num_steps(loader.num_batches() / num_micro_batches);
  ddp::Metrics metrics(ctx, cfg.metrics);
  metrics.begin(0, num_steps);
  for (int64_t step = 0; step < num_steps; ++step) {
    model.zero_grad();
    auto loss_sum = torch::zeros({}, ctx.device());
    int64_t num_samples = 0;
    for (int64_t micro = 0; micro < num_micro_batches; ++micro) {
      // All but the last: backward adds to the local gradients and sends nothing. The guard must
      // also cover the forward.
      std::optional<ddp::NoSync> no_sync;
      if (micro + 1 < num_micro_batches) {
        no_sync.emplace(model);
      }
      const auto batch = loader.next();
      const auto loss = torch::cross_entropy_loss(model.forward(batch.data), batch.target,
                                                  /*weight=*/{}, at::Reduction::Sum);
      // The last one divides the sum of all gradients by the number of all samples. An epoch's last
      // batch may be shorter, so the mean of the batches' means would be another one.
      model.weighted_backward(loss, batch.size());
      loss_sum += loss.detach();
      num_samples += batch.size();
    }
    optimizer->step(0.01);
    metrics.end_step(step, {.loss = loss_sum / num_samples, .num_samples = num_samples});
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train, {ddp::uses({"train.grad_accum_steps"})});
}
