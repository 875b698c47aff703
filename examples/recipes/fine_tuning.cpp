// SPDX-License-Identifier: Apache-2.0
// Starts from torchvision's ResNet-18 with a new classifier, and saves the weights for Python.
//
//   python examples/recipes/convert_weights.py resnet18.pt resnet18.safetensors
//   mpirun -n 2 build/examples/recipes/fine_tuning weights.from=resnet18.safetensors
//   python examples/recipes/convert_weights.py fine_tuned.safetensors fine_tuned.pt
#include <torch/torch.h>

#include "ddp/ddp.hpp"
#include "models/resnet.hpp"

namespace {

struct WeightSettings {
  std::string from = "resnet18.safetensors";
  std::string to = "fine_tuned.safetensors";
};
void describe_fields(WeightSettings& settings, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "from", .doc = "torchvision's weights."}, settings.from);
  visitor.field({.name = "to", .doc = "The weights at the end."}, settings.to);
}

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  const auto weights = cfg.section<WeightSettings>("weights");
  auto dataset = ddp::make_dataset(cfg.data);
  auto module = models::resnet18({.num_classes = dataset->num_classes()});
  if (ctx.is_main()) {  // wrapping sends rank 0's weights to all ranks
    auto tensors = ddp::load_safetensors(weights.from).tensors;
    std::erase_if(tensors, [](const auto& entry) { return entry.first.starts_with("fc."); });
    // Not strict: the new classifier keeps its random weights. What else is missing is logged.
    const auto differences = ddp::load_weights(*module, tensors, weights.from, /*strict=*/false);
    ddp::log_info(weights.from + ": " + differences.to_string());
  }
  module->to(ctx.device());
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  auto optimizer = ddp::make_optimizer(model, cfg.optimizer);
  ddp::DistributedSampler sampler(dataset->size(), ctx.communicator(), cfg.sampler);
  ddp::DataLoader loader(dataset, sampler, ctx.device(), cfg.loader);
  const auto num_steps = cfg.train.num_steps(loader.num_batches());
  const ddp::LrSchedule lr_schedule(cfg.lr_schedule, num_steps);
  ddp::Metrics metrics(ctx, cfg.metrics);
  metrics.begin(0, num_steps);
  for (int64_t step = 0; step < num_steps; ++step) {
    const auto batch = loader.next();
    model.zero_grad();
    const auto loss = torch::cross_entropy_loss(model.forward(batch.data), batch.target);
    loss.backward();
    optimizer->step(lr_schedule.at(step));
    metrics.end_step(step, {.loss = loss, .num_samples = batch.size()});
  }
  if (ctx.is_main()) {  // ranks have equal weights
    ddp::save_weights(*module, weights.to);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train, {ddp::declare_section<WeightSettings>("weights")});
}
