// SPDX-License-Identifier: Apache-2.0
// Trains a model that Python exported with torch.export, in a loop of your own.
//
//   mpirun -n 2 build/examples/recipes/exported_model exported.output=trained.safetensors
#include <torch/torch.h>

#include "ddp/ddp.hpp"
#include "ddp/export/exported_module.hpp"

// In Python, once:
//
//   batch = torch.export.Dim("batch")
//   program = torch.export.export(net.train(), (images,), dynamic_shapes=({0: batch},))
//   torch.export.save(program, "net.pt2")
//
// And with the trained weights:
//
//   net.load_state_dict(safetensors.torch.load_file("trained.safetensors"))

namespace {

struct ExportedSettings {
  std::string path = "data/exported-sample/cifar_net.pt2";
  std::string output = "trained.safetensors";
};
void describe_fields(ExportedSettings& settings, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "path", .doc = "A file of torch.export.save."}, settings.path);
  visitor.field({.name = "output", .doc = "The trained weights."}, settings.output);
}

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  const auto settings = cfg.section<ExportedSettings>("exported");
  ddp::ExportedModule module(settings.path);
  module->to(ctx.device());
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  auto optimizer = ddp::make_optimizer(model, cfg.optimizer);
  auto dataset = ddp::make_dataset(cfg.data);
  ddp::DistributedSampler sampler(dataset->size(), ctx.communicator(), cfg.sampler);
  ddp::DataLoader loader(dataset, sampler, ctx.device(), cfg.loader);
  const auto num_steps = cfg.train.num_steps(loader.num_batches());
  const ddp::LrSchedule lr_schedule(cfg.lr_schedule, num_steps);
  ddp::Metrics metrics(ctx, cfg.metrics);
  metrics.begin(0, num_steps);
  for (int64_t step = 0; step < num_steps; ++step) {
    const auto batch = loader.next();
    model.zero_grad();
    const auto logits = model.forward(batch.data).toTensor();  // tuples and dicts: an IValue too
    const auto loss = torch::cross_entropy_loss(logits, batch.target);
    loss.backward();
    optimizer->step(lr_schedule.at(step));
    metrics.end_step(step, {.loss = loss, .num_samples = batch.size()});
  }
  if (ctx.is_main()) {
    ddp::save_weights(*module, settings.output);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train, {ddp::declare_section<ExportedSettings>("exported")});
}
