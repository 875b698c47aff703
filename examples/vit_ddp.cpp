// SPDX-License-Identifier: Apache-2.0
// Trains a Vision Transformer on images, data-parallel: CIFAR-10 (official files or JPEG tar
// shards), folders of JPEGs, or synthetic images. `--help` lists options and settings.
//
//   mpirun -n 2 build/examples/vit_ddp --config examples/configs/vit_sample.yaml
//   torchrun --no-python --nproc-per-node=8 build/examples/vit_ddp model.name=vit_b_16 …
//   … run.mode=evaluate
//   … run.mode=classify cat.jpg dog.png
//
// The last two do not train. They use the newest checkpoint of checkpoint.dir.
#include "ddp/ddp.hpp"
#include "images/image_program.hpp"
#include "images/vit_settings.hpp"

namespace {

constexpr examples::ImageProgram kProgram{
    .name = "vit_ddp",
    .longer_run =
        "build/examples/vit_ddp --config examples/configs/vit_sample.yaml "
        "train.epochs=30 checkpoint.dir=runs/vit_sample_30",
    .cifar10_config = "examples/configs/cifar10_vit_s_4.yaml"};

void run(ddp::Context& ctx, ddp::Config cfg, const examples::ImageRun& run) {
  const auto settings = cfg.section<examples::VitSettings>("model");
  cfg.loader.image_dtype = examples::choose_image_dtype(cfg, settings.dtype);
  const auto data = examples::open_image_data(cfg.data);
  auto module = examples::make_vit(settings, *data.train, ctx.communicator());
  ddp::DistributedDataParallel model(module, ctx.communicator(), cfg.ddp);
  examples::run_images(ctx, cfg, run, data,
                       {.model = model,
                        .module = *module,
                        .forward = [&](const at::Tensor& x) { return model.forward(x); },
                        .ema_decay = settings.ema_decay,
                        .weights = settings.weights},
                       kProgram);
}

}  // namespace

int main(int argc, char** argv) {
  return examples::run_image_program(argc, argv, run, examples::vit_sections());
}
