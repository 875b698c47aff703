// SPDX-License-Identifier: Apache-2.0
// A data-parallel training program in thirty lines. It runs unchanged alone or on many ranks:
//
//   build/examples/quickstart train.max_steps=100
//   mpirun -n 2 build/examples/quickstart train.max_steps=100 data.path=data/cifar10-sample
//   torchrun --no-python --nproc-per-node=8 build/examples/quickstart amp.dtype=bf16
#include <torch/torch.h>

#include "ddp/ddp.hpp"
#include "models/resnet.hpp"

int main(int argc, char** argv) {
  const auto train = [](ddp::Context& ctx, const ddp::Config& cfg) {
    auto dataset = ddp::make_dataset(cfg.data);
    auto module = models::resnet18(
        {.num_classes = dataset->num_classes(), .in_channels = dataset->layout()->shape[0]});
    module->to(ctx.device());
    ddp::DistributedDataParallel model(module, ctx.communicator(),
                                       cfg.ddp);  // broadcasts from rank 0
    auto optimizer = ddp::make_optimizer(model, cfg.optimizer);
    ddp::GradScaler scaler(cfg.amp);
    ddp::DistributedSampler sampler(dataset->size(), ctx.communicator(), cfg.sampler);
    ddp::DataLoader loader(dataset, sampler, ctx.device(), cfg.loader);
    ddp::Metrics metrics(ctx, cfg.metrics);
    ddp::Checkpointer checkpointer(ctx, cfg.checkpoint, {model, optimizer, scaler, loader});
    const auto num_steps = cfg.train.num_steps(loader.num_batches());
    ddp::LrSchedule lr_schedule(cfg.lr_schedule, num_steps);
    const auto first_step = checkpointer.restore();
    metrics.begin(first_step, num_steps, loader.num_batches());
    for (auto step = first_step; step < num_steps; ++step) {
      auto batch = loader.next();
      auto lr = lr_schedule.at(step);
      model.zero_grad();
      torch::Tensor loss;
      {
        ddp::Autocast autocast(cfg.amp);
        loss = torch::cross_entropy_loss(model.forward(batch.data), batch.target);
      }
      scaler.scale(loss).backward();  // outside autocast; buckets are reduced during the backward
      scaler.unscale_(*optimizer);
      auto norm = ddp::clip_grad_norm_(model, cfg.train.max_grad_norm);
      scaler.step(*optimizer, lr);
      scaler.update();
      metrics.end_step(step,
                       {.loss = loss, .num_samples = batch.size(), .lr = lr, .grad_norm = norm});
      checkpointer.save_if_due(step);  // on an agreed stop: saves, throws ddp::Stop, run() exits 75
    }
  };
  // run() refuses settings that neither this program nor its objects use.
  return ddp::run(argc, argv, train, {ddp::uses({"train.max_grad_norm"})});
}
