// SPDX-License-Identifier: Apache-2.0
// A section of settings of the program's own, own defaults of the library's settings, and a setting
// of the library that the program's loop reads.
//
//   build/examples/recipes/own_settings model.hidden=32,16 train.label_smoothing=0.1
#include <torch/torch.h>

#include "ddp/ddp.hpp"

namespace {

enum class Activation { Relu, Tanh };

struct ModelSettings {
  std::vector<int64_t> hidden = {64};
  Activation activation = Activation::Relu;
  double dropout = 0.1;
};
// One description for YAML, key=value, --help, the saved settings and the check that ranks agree.
void describe_fields(ModelSettings& settings, ddp::FieldVisitor& visitor) {
  visitor.field({.name = "hidden", .doc = "Units of each hidden layer.", .min = 1},
                settings.hidden);
  visitor.field({.name = "activation", .doc = "Between the layers."}, settings.activation,
                {{"relu", Activation::Relu}, {"tanh", Activation::Tanh}});
  visitor.field({.name = "dropout", .doc = "Before the classifier.", .min = 0, .max = 1},
                settings.dropout);
}

// The program's own defaults of two library sections. All keys of these sections remain.
struct OptimizerDefaults : ddp::OptimizerOptions {
  OptimizerDefaults() {
    type = ddp::OptimizerType::AdamW;
    weight_decay = 0.01;
  }
};
struct LrScheduleDefaults : ddp::LrScheduleOptions {
  LrScheduleDefaults() { lr = 1e-3; }
};

torch::nn::Sequential make_mlp(const ModelSettings& settings) {
  torch::nn::Sequential mlp{torch::nn::Flatten()};
  int64_t width = 3 * 32 * 32;
  for (const auto hidden : settings.hidden) {
    mlp->push_back(torch::nn::Linear(width, hidden));
    if (settings.activation == Activation::Relu) {
      mlp->push_back(torch::nn::ReLU());
    } else {
      mlp->push_back(torch::nn::Tanh());
    }
    width = hidden;
  }
  mlp->push_back(torch::nn::Dropout(settings.dropout));
  mlp->push_back(torch::nn::Linear(width, 10));
  return mlp;
}

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  auto module = make_mlp(cfg.section<ModelSettings>("model"));
  module->to(ctx.device());
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  auto optimizer = ddp::make_optimizer(model, cfg.optimizer);
  auto dataset = ddp::make_dataset(cfg.data);
  ddp::DistributedSampler sampler(dataset->size(), ctx.communicator(), cfg.sampler);
  ddp::DataLoader loader(dataset, sampler, ctx.device(), cfg.loader);
  const auto num_steps = cfg.train.num_steps(loader.num_batches());
  const ddp::LrSchedule lr_schedule(cfg.lr_schedule, num_steps);
  const auto smoothing =
      torch::nn::functional::CrossEntropyFuncOptions().label_smoothing(cfg.train.label_smoothing);
  ddp::Metrics metrics(ctx, cfg.metrics);
  metrics.begin(0, num_steps);
  for (int64_t step = 0; step < num_steps; ++step) {
    const auto batch = loader.next();
    model.zero_grad();
    const auto loss =
        torch::nn::functional::cross_entropy(model.forward(batch.data), batch.target, smoothing);
    loss.backward();
    optimizer->step(lr_schedule.at(step));
    metrics.end_step(step, {.loss = loss, .num_samples = batch.size()});
  }
}

}  // namespace

int main(int argc, char** argv) {
  // A setting that nothing reads is an error, so the program names what it reads itself.
  return ddp::run(argc, argv, train,
                  {ddp::declare_section<ModelSettings>("model"),
                   ddp::declare_section<OptimizerDefaults>("optimizer"),
                   ddp::declare_section<LrScheduleDefaults>("lr_schedule"),
                   ddp::uses({"train.label_smoothing"})});
}
