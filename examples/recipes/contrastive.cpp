// SPDX-License-Identifier: Apache-2.0
// Contrastive learning (SimCLR): each image is compared with the images of all ranks.
//
//   mpirun -n 2 build/examples/recipes/contrastive train.epochs=10 loader.global_batch_size=128
//   mpirun -n 2 build/examples/recipes/contrastive train.epochs=10 train.grad_accum_steps=4
#include <torch/torch.h>

#include <optional>
#include <vector>

#include "ddp/ddp.hpp"

namespace {

// Two views of each image, which the data set's augmentation draws for two different epochs.
struct TwoViews {
  std::shared_ptr<ddp::Dataset> images;

  int64_t size() const { return images->size(); }
  ddp::Example get(int64_t index) const { return get_for_epoch(index, 0); }
  ddp::Example get_for_epoch(int64_t index, int64_t epoch) const {
    auto first = images->get_for_epoch(index, 2 * epoch);
    const auto second = images->get_for_epoch(index, 2 * epoch + 1);
    return {torch::stack({first.data, second.data}), first.target};  // [2, 3, 32, 32]
  }
};

struct Pairs {
  torch::Tensor logits;   // [2N, 2N of all ranks]: own views with those of all ranks
  torch::Tensor targets;  // [2N]: the column of each view's partner
};

// `own` has N first views and then their N second views. All ranks have the same N.
Pairs compare(const torch::Tensor& own, const ddp::Context& ctx) {
  constexpr double kTemperature = 0.2;
  const auto all = ddp::all_gather_with_grad(own, ctx.communicator());
  const auto num_views = own.size(0);
  const auto rows = torch::arange(num_views, own.device());
  const auto first_column = ctx.rank() * num_views;
  // No view is compared with itself.
  const auto itself = (rows + first_column).unsqueeze(1);
  const auto logits = own.mm(all.t()).div(kTemperature).scatter(1, itself, -1e9);
  return {logits, first_column + (rows + num_views / 2).remainder(num_views)};
}

// The mean over this rank's views. The mean of the ranks' losses is the loss of the whole batch,
// and the gradients that backward averages are its gradients.
torch::Tensor loss_of(const Pairs& pairs) {
  return torch::cross_entropy_loss(pairs.logits, pairs.targets);
}

torch::Tensor unit(const torch::Tensor& x) {
  return torch::nn::functional::normalize(x);
}

// GradCache: the backward of the same loss with the activations of one chunk of views at a time.
// The loss is no sum over chunks, but its gradient is, once the gradient of each embedding is
// known.
template <typename Model>
Pairs backward_in_chunks(Model& model, const std::vector<torch::Tensor>& chunks,
                         const ddp::Context& ctx) {
  std::vector<torch::Tensor> embeddings;
  std::vector<int64_t> sizes;
  for (const auto& views : chunks) {
    const torch::NoGradGuard no_grad;
    embeddings.push_back(model.module()->forward(views));
    sizes.push_back(views.size(0));
  }
  const auto own = torch::cat(embeddings).requires_grad_();
  auto pairs = compare(unit(own), ctx);
  loss_of(pairs).backward();  // ends at the embeddings
  const auto gradients = own.grad().split_with_sizes(sizes);
  for (size_t i = 0; i < chunks.size(); ++i) {
    std::optional<ddp::NoSync> no_sync;
    if (i + 1 < chunks.size()) {
      no_sync.emplace(model);
    }
    (model.forward(chunks[i]) * gradients[i]).sum().backward();
  }
  return pairs;
}

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  const auto conv = [](int64_t inputs, int64_t outputs) {
    return torch::nn::Conv2d(torch::nn::Conv2dOptions(inputs, outputs, 3).stride(2).padding(1));
  };
  torch::nn::Sequential module(conv(3, 16), torch::nn::ReLU(), conv(16, 32), torch::nn::ReLU(),
                               torch::nn::AdaptiveAvgPool2d(2), torch::nn::Flatten(),
                               torch::nn::Linear(128, 32));
  module->to(ctx.device());
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  auto optimizer = ddp::make_optimizer(model, cfg.optimizer);
  auto dataset = std::make_shared<TwoViews>(TwoViews{ddp::make_dataset(cfg.data)});
  ddp::DistributedSampler sampler(dataset->size(), ctx.communicator(), cfg.sampler);
  ddp::DataLoader loader(dataset, sampler, ctx.device(), cfg.loader);

  const auto num_steps = cfg.train.num_steps(loader.num_batches());
  const ddp::LrSchedule lr_schedule(cfg.lr_schedule, num_steps);
  auto metrics_options = cfg.metrics;  // the chunks of a step are of one batch
  metrics_options.run.batch_size_per_rank = cfg.loader.batch_size;
  metrics_options.run.global_batch_size = cfg.loader.global_batch_size;
  ddp::Metrics metrics(ctx, metrics_options);
  metrics.begin(0, num_steps);
  for (int64_t step = 0; step < num_steps; ++step) {
    const auto batch = loader.next();
    model.zero_grad();
    const auto views = batch.data.transpose(0, 1).flatten(0, 1);  // [2N, 3, 32, 32]
    Pairs pairs;
    if (cfg.train.grad_accum_steps > 1) {
      pairs = backward_in_chunks(model, views.chunk(cfg.train.grad_accum_steps), ctx);
    } else {
      pairs = compare(unit(model.forward(views)), ctx);
      loss_of(pairs).backward();
    }
    const auto lr = lr_schedule.at(step);
    optimizer->step(lr);
    metrics.log("found", pairs.logits.argmax(1).eq(pairs.targets).to(torch::kFloat).mean());
    metrics.end_step(step, {.loss = loss_of(pairs), .num_samples = batch.size(), .lr = lr});
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train, {ddp::uses({"train.grad_accum_steps"})});
}
