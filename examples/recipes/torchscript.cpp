// SPDX-License-Identifier: Apache-2.0
// Trains a module that torch.jit.script saved in Python, and saves it again for Python.
//
//   python examples/recipes/torchscript_net.py net.pt
//   mpirun -n 2 build/examples/recipes/torchscript script.path=net.pt script.output=trained.pt
#include <torch/script.h>
#include <torch/torch.h>

#include "ddp/ddp.hpp"

namespace {

struct ScriptSettings {
  std::string path = "net.pt";
  std::string output = "trained.pt";
};
void describe_fields(ScriptSettings& settings, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "path", .doc = "A file of torch.jit.save."}, settings.path);
  visitor.field({.name = "output", .doc = "The trained module."}, settings.output);
}

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  const auto script = cfg.section<ScriptSettings>("script");
  auto module = torch::jit::load(script.path, ctx.device());
  module.train();
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
    const auto logits = model.forward(batch.data).toTensor();  // a script returns an IValue
    const auto loss = torch::cross_entropy_loss(logits, batch.target);
    loss.backward();
    optimizer->step(lr_schedule.at(step));
    metrics.end_step(step, {.loss = loss, .num_samples = batch.size()});
  }
  if (ctx.is_main()) {
    module.save(script.output);  // a handle: it shares the parameters that the model trained
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train, {ddp::declare_section<ScriptSettings>("script")});
}
