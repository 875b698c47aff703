// SPDX-License-Identifier: Apache-2.0
// Ranks with different numbers of batches, in the usual loop with metrics and checkpoints. Every
// sample counts once, so the losses are the same on any number of ranks.
//
//   mpirun -n 4 build/examples/recipes/uneven_data train.epochs=20
#include <torch/torch.h>

#include <algorithm>

#include "ddp/ddp.hpp"

namespace {

constexpr int64_t kFeatures = 8;

// 50 samples in batches of 16: the last batch has two samples, so of four ranks two have none.
struct LoaderDefaults : ddp::LoaderOptions {
  LoaderDefaults() { global_batch_size = 16; }
};
struct SamplerDefaults : ddp::SamplerOptions {
  SamplerDefaults() { pad = false; }  // no sample twice to make the ranks even
};

std::shared_ptr<ddp::TensorDataset> make_samples() {
  const auto random = torch::make_generator<at::CPUGeneratorImpl>(1);
  const auto inputs = torch::randn({50, kFeatures}, random);
  return std::make_shared<ddp::TensorDataset>(inputs, inputs.sum(1, /*keepdim=*/true));
}

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  torch::nn::Linear module(kFeatures, 1);
  module->to(ctx.device());
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  auto optimizer = ddp::make_optimizer(model, cfg.optimizer);
  auto samples = make_samples();
  ddp::DistributedSampler sampler(samples->size(), ctx.communicator(), cfg.sampler);
  ddp::DataLoader loader(samples, sampler, ctx.device(), cfg.loader);
  ddp::Metrics metrics(ctx, cfg.metrics);
  auto checkpoint = cfg.checkpoint;
  checkpoint.samples_per_step = cfg.loader.global_batch_size;  // a resume with others warns
  ddp::Checkpointer checkpointer(ctx, checkpoint, {model, optimizer, loader});

  auto step = checkpointer.restore();
  // Ranks have different numbers of batches, but make the same steps: those of rank 0, which has
  // the most. A rank that has read its last batch of an epoch stands at the next epoch, also after
  // a resume, so rank 0's epoch counts too.
  const auto of_all_ranks =
      ctx.control_plane().all_gather_numbers({loader.num_batches(), loader.epoch()});
  const auto steps_per_epoch = of_all_ranks[0][0];
  const auto num_steps = cfg.train.num_steps(steps_per_epoch);
  const ddp::LrSchedule lr_schedule(cfg.lr_schedule, num_steps);
  metrics.begin(step, num_steps, steps_per_epoch);

  const auto train_step = [&](bool has_batch) {
    ddp::Batch batch{.data = torch::zeros({0, kFeatures}, ctx.device()),
                     .target = torch::zeros({0, 1}, ctx.device())};
    if (has_batch) {
      batch = loader.next();
    }
    const auto count = batch.data.size(0);
    const auto lr = lr_schedule.at(step);
    model.zero_grad();
    const auto loss_sum =
        torch::mse_loss(model.forward(batch.data), batch.target, at::Reduction::Sum);
    model.weighted_backward(loss_sum, count);  // divides by the samples of all ranks
    optimizer->step(lr);
    metrics.end_step(step, {.loss = loss_sum / std::max<int64_t>(count, 1),  // weighted by `count`
                            .num_samples = count,
                            .lr = lr});
    checkpointer.save_if_due(step++);
  };
  // The loader counts epochs: after a resume with another batch, `step` is no measure of them.
  for (auto epoch = of_all_ranks[0][1];; loader.begin_epoch(++epoch)) {
    ddp::join(model, train_step, [&] { return step < num_steps && loader.epoch() == epoch; });
    if (step >= num_steps) {
      break;
    }
  }
  checkpointer.save(step - 1);
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train,
                  {ddp::declare_section<LoaderDefaults>("loader"),
                   ddp::declare_section<SamplerDefaults>("sampler")});
}
