// SPDX-License-Identifier: Apache-2.0
// The C++ side of torchvision_interchange.py.
//
// usage: torchvision_tool MODEL WEIGHTS INPUT OUTPUT CHECKPOINTS
// Loads the weights of a file into a ResNet-18 or ViT-B/16, as their trainers do. Writes its
// eval-mode outputs for the tensor "input", and a checkpoint.
#include <torch/torch.h>

#include <iostream>
#include <string>

#include "ddp/core/safetensors.hpp"
#include "ddp/ddp.hpp"
#include "images/model_options.hpp"
#include "images/vit_settings.hpp"

namespace {

constexpr int64_t kClasses = 1000;

struct Files {
  std::string weights, input, output, checkpoints;
};

template <class Holder>
void exchange(ddp::Context& context, Holder module, const torch::Tensor& input,
              const Files& files) {
  {
    const torch::NoGradGuard no_grad;
    module->eval();
    ddp::save_safetensors(files.output, {{"output", module->forward(input)}});
  }
  ddp::DistributedDataParallel model(module, context.communicator());
  ddp::CheckpointOptions options;
  options.dir = files.checkpoints;
  ddp::Checkpointer checkpointer(context, options, {model});
  checkpointer.save(0);
}

void run(const std::string& name, const Files& files) {
  ddp::ContextOptions on_cpu;
  on_cpu.device = ddp::DeviceChoice::Cpu;
  auto context = ddp::Context::create(on_cpu);
  const auto input = ddp::load_safetensors(files.input).tensors.at("input");
  const auto data = ddp::make_dataset(
      {.format = ddp::DataFormat::Synthetic, .image_size = input.size(2), .num_classes = kClasses});
  if (name == "resnet18") {
    examples::ModelOptions from_file;
    from_file.weights = files.weights;
    exchange(context, examples::make_model(from_file, *data, context.communicator()), input, files);
  } else {
    examples::VitSettings from_file;
    from_file.name = name;
    from_file.weights = files.weights;
    exchange(context, examples::make_vit(from_file, *data, context.communicator()), input, files);
  }
  context.close();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::cerr << "usage: torchvision_tool MODEL WEIGHTS INPUT OUTPUT CHECKPOINTS\n";
    return 64;
  }
  try {
    run(argv[1], {argv[2], argv[3], argv[4], argv[5]});
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
