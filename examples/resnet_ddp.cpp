// SPDX-License-Identifier: Apache-2.0
// Trains a ResNet or a small CNN on images, data-parallel: CIFAR-10, CIFAR-100, MNIST, tar shards
// or folders of image files, or synthetic images. `--help` lists options and settings.
//
//   mpirun -n 2 build/examples/resnet_ddp --config examples/configs/quickstart.yaml
//   srun build/examples/resnet_ddp --config examples/configs/cifar10_resnet18_cifar_stem.yaml
//   torchrun --no-python --nproc-per-node=8 build/examples/resnet_ddp model.name=resnet50 …
//   … run.mode=evaluate
//   … run.mode=classify cat.jpg dog.png
//
// The last two do not train. They use the newest checkpoint of checkpoint.dir.
#include "ddp/ddp.hpp"
#include "images/image_program.hpp"
#include "images/model_options.hpp"

namespace {

constexpr examples::ImageProgram kProgram{
    .name = "resnet_ddp",
    .longer_run = "./quickstart.sh train.epochs=30",
    .cifar10_config = "examples/configs/cifar10_resnet18_cifar_stem.yaml"};

template <typename Module>
void run_module(ddp::Context& ctx, const ddp::Config& cfg, const examples::ImageRun& run,
                const examples::ModelOptions& options, const examples::ImageData& data,
                Module module) {
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  examples::run_images(ctx, cfg, run, data,
                       {.model = model,
                        .module = *module,
                        .forward = [&](const at::Tensor& x) { return model.forward(x); },
                        .ema_decay = options.ema_decay,
                        .weights = options.weights},
                       kProgram);
}

void run(ddp::Context& ctx, ddp::Config cfg, const examples::ImageRun& run) {
  const auto options = cfg.section<examples::ModelOptions>("model");
  cfg.loader.image_dtype = examples::choose_image_dtype(cfg, options.dtype);
  const auto data = examples::open_image_data(cfg.data, options.channels_last);
  if (options.name == examples::kSimpleCnn) {
    run_module(ctx, cfg, run, options, data,
               examples::make_simple_cnn(options, *data.train, ctx.communicator()));
  } else {
    run_module(ctx, cfg, run, options, data,
               examples::make_model(options, *data.train, ctx.communicator()));
  }
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_image_program(argc, argv, run, examples::resnet_sections());
}
