// SPDX-License-Identifier: Apache-2.0
// Trains a small convolutional network on waveforms, images or volumes, data-parallel, for classes
// or for values. The data is a safetensors file of tensors. `--help` lists options and settings.
//
//   mpirun -n 2 build/examples/cnn_ddp --config examples/configs/cnn_sample.yaml
//   torchrun --no-python --nproc-per-node=8 build/examples/cnn_ddp model.loss=mse
//       tensors.path=train.safetensors tensors.eval_path=eval.safetensors …
#include <torch/torch.h>

#include <iostream>
#include <map>
#include <string>

#include "ddp/ddp.hpp"
#include "tensors/cnn_settings.hpp"
#include "tensors/tensor_trainer.hpp"

namespace {

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  const auto settings = cfg.section<examples::CnnSettings>("model");
  examples::check_loss_settings(settings.loss, cfg);
  const auto data =
      examples::open_tensors(cfg.section<examples::CnnFiles>("tensors"), settings.loss);
  auto module = examples::make_cnn(settings, data, ctx.communicator());
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  if (ctx.is_main()) {
    std::cout << data.train->size() << " training and " << data.eval->size()
              << " evaluation samples; " << data.names.front() << ' '
              << data.train->get(0).tensors.front().sizes().slice(1) << " to "
              << module->options().num_classes << " outputs\n"
              << std::flush;
  }
  using Arguments = std::map<std::string, c10::IValue>;
  const auto input = [&](const Arguments& arguments) {  // may be integers, as a digitizer's counts
    return arguments.at(data.names.front()).toTensor().to(torch::kFloat32);
  };
  const auto run = examples::train_tensors(
      ctx, cfg, data, {.model = model, .module = *module, .ema_decay = settings.ema_decay},
      {.wrapper = [&](const Arguments& arguments) { return model.forward(input(arguments)); },
       .module = [&](const Arguments& arguments) { return module->forward(input(arguments)); }});
  if (ctx.is_main()) {
    std::cout << examples::sample_report(run, "samples", "", ctx, cfg) << std::flush;
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train, examples::cnn_sections());
}
