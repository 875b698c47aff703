// SPDX-License-Identifier: Apache-2.0
// The C++ side of torchvision_interchange.py.
//
// usage: torchvision_tool WEIGHTS INPUT OUTPUT CHECKPOINTS
// Loads the weights of a file into a ResNet-18, as resnet_ddp does. Writes its eval-mode outputs
// for the tensor "input", and a checkpoint.
#include <torch/torch.h>

#include <iostream>

#include "common/model_options.hpp"
#include "ddp/core/safetensors.hpp"
#include "ddp/ddp.hpp"

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: torchvision_tool WEIGHTS INPUT OUTPUT CHECKPOINTS\n";
    return 64;
  }
  try {
    ddp::ContextOptions on_cpu;
    on_cpu.device = "cpu";
    auto context = ddp::Context::create(on_cpu);
    examples::ModelOptions from_file;
    from_file.weights = argv[1];
    auto module = examples::make_model(from_file, /*num_classes=*/1000, context.communicator());
    {
      const torch::NoGradGuard no_grad;
      module->eval();
      const auto input = ddp::load_safetensors(argv[2]).tensors.at("input");
      ddp::save_safetensors(argv[3], {{"output", module->forward(input)}});
    }
    ddp::DistributedDataParallel model(module, context.communicator());
    ddp::CheckpointOptions options;
    options.dir = argv[4];
    {
      ddp::Checkpointer checkpointer(context, options, {model});
      checkpointer.save(0);
    }
    context.close();
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
