// SPDX-License-Identifier: Apache-2.0
// What a program of somebody else does first: includes everything, wraps one of our models, takes a
// step, and sees that the parameters moved. With arguments it is a training program of its own:
//
//   consumer train.max_steps=3 train.batch_size=4 lr_schedule.lr=0.01

// torch/torch.h and ddp/ddp.hpp are in the precompiled header of ddp::pch alone.
#include <iostream>

#include "models/resnet.hpp"
#include "models/simple_cnn.hpp"
#include "models/tokens/token_dataset.hpp"

namespace {

// A step of the wrapped model changes its parameters; no gradient is missing.
template <typename Module>
bool trains(const Module& module, const torch::Tensor& images) {
  ddp::DistributedDataParallel model(module, ddp::make_single_communicator(at::Device("cpu")));
  ddp::OptimizerOptions options;
  auto optimizer = ddp::make_optimizer(model, options);
  const auto before = module->parameters().back().detach().clone();
  auto loss = torch::cross_entropy_loss(model.forward(images), torch::tensor({1, 3}));
  loss.backward();
  for (const auto& parameter : module->named_parameters()) {
    if (!parameter.value().grad().defined()) {
      std::cerr << parameter.key() << " has no gradient\n";
      return false;
    }
  }
  ddp::GradScaler scaler(ddp::AmpOptions{});
  scaler.step(*optimizer, 0.1);
  return !torch::equal(before, module->parameters().back());
}

// Own data, own loop: of libddp's settings it uses those of the model, optimizer and schedule, and
// the two that it reads itself.
void train(ddp::Context& ctx, const ddp::Config& cfg) {
  models::SimpleCnn module(models::SimpleCnnOptions{});
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  auto optimizer = ddp::make_optimizer(model, cfg.optimizer);
  const ddp::LrSchedule lr_schedule(cfg.lr_schedule);
  for (int64_t step = 0; step < cfg.train.max_steps; ++step) {
    ctx.set_progress(step, "forward");
    const auto images = torch::randn({cfg.train.batch_size, 3, 32, 32});
    const auto target = torch::randint(10, {cfg.train.batch_size});
    model.zero_grad();
    torch::cross_entropy_loss(model.forward(images), target).backward();
    optimizer->step(lr_schedule.at(step));
    std::cout << "step " << step << std::endl;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) {
    return ddp::run(argc, argv, train, {ddp::uses({"train.batch_size"})});
  }
  torch::manual_seed(0);
  const auto images = torch::randn({2, 3, 32, 32});
  const bool resnet = trains(models::resnet18({.num_classes = 10}), images);
  const bool cnn = trains(models::SimpleCnn(models::SimpleCnnOptions{}), images);
  std::cout << "resnet18 " << (resnet ? "trains" : "does not train") << ", simple_cnn "
            << (cnn ? "trains" : "does not train") << "\n";
  const bool tokens = models::valid_utf8("caf\xC3\xA9 \xFF") == "caf\xC3\xA9 \xEF\xBF\xBD";
  if (!tokens) {
    std::cerr << "ddp::tokens gives other bytes\n";
  }
  return resnet && cnn && tokens ? 0 : 1;
}
