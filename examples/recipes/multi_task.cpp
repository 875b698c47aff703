// SPDX-License-Identifier: Apache-2.0
// Two tasks with one trunk. Most samples have the label of one task only, so the ranks have
// different numbers of labels. The weights are those of one process.
//
//   mpirun -n 2 build/examples/recipes/multi_task train.epochs=20 checkpoint.dir=runs/multi_task
#include <torch/torch.h>

#include <cmath>
#include <vector>

#include "ddp/ddp.hpp"

namespace {

constexpr int64_t kFeatures = 8, kClasses = 3;

struct Scores {
  torch::Tensor classes, value;
};
// How the wrapper finds the outputs.
void for_each_tensor(Scores& scores, const ddp::TensorVisitor& visit) {
  visit(scores.classes);
  visit(scores.value);
}

struct TwoHeadsImpl : torch::nn::Module {
  Scores forward(const torch::Tensor& inputs) {
    const auto features = torch::tanh(trunk->forward(inputs));
    return {class_head->forward(features), value_head->forward(features).squeeze(1)};
  }
  torch::nn::Linear trunk = register_module("trunk", torch::nn::Linear(kFeatures, 16));
  torch::nn::Linear class_head = register_module("class_head", torch::nn::Linear(16, kClasses));
  torch::nn::Linear value_head = register_module("value_head", torch::nn::Linear(16, 1));
};
TORCH_MODULE(TwoHeads);

// Inputs, classes (-1: not known) and values (NaN: not known) of 60 samples.
std::shared_ptr<ddp::TensorListDataset> make_samples() {
  const auto random = torch::make_generator<at::CPUGeneratorImpl>(1);
  const auto inputs = torch::randn({60, kFeatures}, random);
  const auto order = torch::rand({60}, random);
  const auto classes = inputs.slice(1, 0, kClasses).argmax(1).masked_fill(order < 0.7, -1);
  const auto values = inputs.sum(1).masked_fill(order > 0.8, NAN);
  return std::make_shared<ddp::TensorListDataset>(
      std::vector<torch::Tensor>{inputs, classes, values});
}

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  TwoHeads module;
  module->to(ctx.device());
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  auto optimizer = ddp::make_optimizer(model, cfg.optimizer);
  auto samples = make_samples();
  ddp::DistributedSampler sampler(samples->size(), ctx.communicator(), cfg.sampler);
  ddp::DataLoader loader(samples, sampler, ctx.device(), cfg.loader);
  ddp::Metrics metrics(ctx, cfg.metrics);
  ddp::Checkpointer checkpointer(ctx, cfg.checkpoint, {model, optimizer, loader});

  const auto num_steps = cfg.train.num_steps(loader.num_batches());
  auto step = checkpointer.restore();
  metrics.begin(step, num_steps, loader.num_batches());
  for (; step < num_steps; ++step) {
    const auto batch = loader.next();
    const auto &inputs = batch[0], &classes = batch[1], &values = batch[2];
    const auto has_class = classes >= 0, has_value = values.isfinite();
    const auto own = torch::stack({has_class.sum(), has_value.sum()});
    const auto of_all = own.clone();  // labels of all ranks
    ctx.communicator()->all_reduce(of_all)->wait();

    model.zero_grad();
    const auto scores = model.forward(inputs);
    // Sums, because a rank may have no label of a task.
    const auto class_sum = torch::cross_entropy_loss(
        scores.classes.index({has_class}), classes.index({has_class}), {}, at::Reduction::Sum);
    const auto value_sum = torch::mse_loss(scores.value.index({has_value}),
                                           values.index({has_value}), at::Reduction::Sum);
    const auto num_labels = of_all.clamp_min(1);
    const auto loss = class_sum / num_labels[0] + value_sum / num_labels[1];
    // One backward of both tasks. Each rank's loss is a part of the whole loss. The wrapper divides
    // by the sum of the counts, which is 1, so the parts are added.
    model.weighted_backward(loss, 1.0 / ctx.world_size());
    optimizer->step(0.05);

    const auto counts = own.clamp_min(1);
    metrics.log("class_loss", class_sum / counts[0], {.weight = own[0].item<double>()});
    metrics.log("value_loss", value_sum / counts[1], {.weight = own[1].item<double>()});
    metrics.end_step(step, {.num_samples = inputs.size(0)});
    checkpointer.save_if_due(step);
  }
  checkpointer.save(step - 1);
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train);
}
