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
  std::string weights = "";
};
void describe_fields(ScriptSettings& settings, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "path", .doc = "A file of torch.jit.save."}, settings.path);
  visitor.field({.name = "output", .doc = "The trained module."}, settings.output);
  visitor.field({.name = "weights", .doc = "A safetensors file to start from."}, settings.weights);
}

// As ddp::named_weights of a torch::nn module: the tensors alias the module's memory.
ddp::TensorMap named_weights(const torch::jit::Module& module) {
  ddp::TensorMap weights;
  for (const auto& [name, tensor] : module.named_parameters()) {
    weights.emplace(name, tensor.detach());
  }
  for (const auto& [name, tensor] : module.named_buffers()) {
    weights.emplace(name, tensor.detach());
  }
  return weights;
}

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  const auto script = cfg.section<ScriptSettings>("script");
  auto module = torch::jit::load(script.path, ctx.device());
  module.train();
  if (!script.weights.empty()) {
    const auto file = ddp::load_safetensors(script.weights).tensors;
    ddp::load_weights(named_weights(module), file, script.weights);
  }
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
    ddp::save_safetensors(script.output + ".safetensors", named_weights(module));
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train, {ddp::declare_section<ScriptSettings>("script")});
}
