// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <iostream>

#include "ddp/comm/communicator.hpp"
#include "ddp/core/error.hpp"

int main() {
  auto communicator = ddp::make_single_communicator(at::Device("cpu"));
  auto tensor = torch::arange(4, torch::kFloat);
  communicator->all_reduce(tensor)->wait();
  std::cout << communicator->backend() << " " << tensor.sum().item<float>() << "\n";
  return tensor.sum().item<float>() == 6.0F ? 0 : 1;
}
