// SPDX-License-Identifier: Apache-2.0
// Accuracy and accuracy@5 of the test images after each epoch, over all ranks.
//
//   mpirun -n 2 build/examples/recipes/evaluation train.epochs=2 lr_schedule.lr=0.01
#include <torch/torch.h>

#include "ddp/ddp.hpp"

namespace {

template <typename Model, typename Loader>
void evaluate(Model& model, Loader& loader, ddp::Metrics& metrics) {
  const ddp::Metrics::ClockPause pause(metrics);  // the rates count training only
  const torch::NoGradGuard no_grad;
  model.eval();
  loader.begin_epoch(0);  // a data set with get_for_epoch gives the same samples each time
  for (auto& batch : loader) {
    const auto logits = model.forward(batch.data);
    // The five best classes of each image, the best one first: [N, 5].
    const auto hits =
        std::get<1>(logits.topk(5, 1)).eq(batch.target.unsqueeze(1)).to(torch::kFloat);
    // Weights make the mean exact: batches and ranks may hold different numbers of images.
    const auto num_images = static_cast<double>(batch.size());
    metrics.log_epoch("top1", hits.select(1, 0).mean(), {.weight = num_images});
    metrics.log_epoch("top5", hits.sum(1).mean(), {.weight = num_images});
    metrics.log_epoch("images", num_images, {.reduction = ddp::MetricReduction::Sum});
  }
  model.train();
}

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  torch::nn::Sequential module(torch::nn::Flatten(), torch::nn::Linear(3 * 32 * 32, 10));
  module->to(ctx.device());
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  auto optimizer = ddp::make_optimizer(model, cfg.optimizer);

  auto train_set = ddp::make_dataset(cfg.data);
  ddp::DistributedSampler sampler(train_set->size(), ctx.communicator(), cfg.sampler);
  ddp::DataLoader loader(train_set, sampler, ctx.device(), cfg.loader);
  auto test_set = ddp::make_dataset(cfg.data, ddp::Split::Test);
  // Each test image once: no padding, so ranks may have different numbers of images.
  ddp::DistributedSampler test_sampler(test_set->size(), ctx.communicator(),
                                       ddp::eval_sampler_options(cfg.sampler));
  ddp::DataLoader test_loader(test_set, test_sampler, ctx.device(),
                              ddp::eval_loader_options(cfg.loader));

  const auto num_steps = cfg.train.num_steps(loader.num_batches());
  const ddp::LrSchedule lr_schedule(cfg.lr_schedule, num_steps);
  ddp::Metrics metrics(ctx, cfg.metrics);
  metrics.begin(0, num_steps);
  for (int64_t step = 0; step < num_steps; ++step) {
    const auto batch = loader.next();
    model.zero_grad();
    const auto loss = torch::cross_entropy_loss(model.forward(batch.data), batch.target);
    loss.backward();
    const auto lr = lr_schedule.at(step);
    optimizer->step(lr);
    metrics.end_step(step, {.loss = loss, .num_samples = batch.size(), .lr = lr});
    if ((step + 1) % loader.num_batches() == 0) {
      evaluate(model, test_loader, metrics);
      // Reduces over ranks, logs, and writes epochs.csv and epochs.jsonl.
      metrics.end_epoch(step / loader.num_batches());
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train);
}
