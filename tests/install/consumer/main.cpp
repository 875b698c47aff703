// SPDX-License-Identifier: Apache-2.0
// What a program of somebody else does first: includes everything, wraps one of our models, takes a
// step, and sees that the parameters moved.
#include <torch/torch.h>

#include <iostream>

#include "ddp/ddp.hpp"
#include "models/resnet.hpp"
#include "models/simple_cnn.hpp"

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
  scaler.step(optimizer, 0.1);
  return !torch::equal(before, module->parameters().back());
}

}  // namespace

int main() {
  torch::manual_seed(0);
  const auto images = torch::randn({2, 3, 32, 32});
  const bool resnet = trains(models::resnet18({.num_classes = 10}), images);
  const bool cnn = trains(models::SimpleCnn(models::SimpleCnnOptions{}), images);
  std::cout << "resnet18 " << (resnet ? "trains" : "does not train") << ", simple_cnn "
            << (cnn ? "trains" : "does not train") << "\n";
  return resnet && cnn ? 0 : 1;
}
