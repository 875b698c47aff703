// SPDX-License-Identifier: Apache-2.0
// Trains a ResNet on images, data-parallel: CIFAR-10, CIFAR-100, MNIST, tar shards or folders of
// image files, or synthetic images. `--help` lists options and settings.
//
//   mpirun -n 2 build/examples/resnet_ddp --config examples/configs/quickstart.yaml
//   srun build/examples/resnet_ddp --config examples/configs/cifar10_resnet18_cifar_stem.yaml
//   torchrun --no-python --nproc-per-node=8 build/examples/resnet_ddp model.name=resnet50 …
#include "common/image_trainer.hpp"
#include "common/model_options.hpp"
#include "ddp/ddp.hpp"

namespace {

constexpr examples::ImageProgram kProgram{
    .name = "resnet_ddp",
    .longer_run = "./quickstart.sh train.epochs=30",
    .cifar10_config = "examples/configs/cifar10_resnet18_cifar_stem.yaml"};

void train(ddp::Context& ctx, ddp::Config cfg) {
  const auto options = cfg.section<examples::ModelOptions>("model");
  cfg.loader.image_dtype = examples::choose_image_dtype(cfg, options.dtype);
  const auto data = examples::open_image_data(cfg.data, options.channels_last);
  auto module = examples::make_model(options, *data.train, ctx.communicator());
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  examples::train_images(ctx, cfg, data,
                         {.model = model,
                          .module = *module,
                          .forward = [&](const at::Tensor& x) { return model.forward(x); },
                          .ema_decay = options.ema_decay},
                         kProgram);
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(
      argc, argv, [](ddp::Context& ctx, const ddp::Config& cfg) { train(ctx, cfg); },
      examples::resnet_sections());
}
