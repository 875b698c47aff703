// SPDX-License-Identifier: Apache-2.0
// Trains any model that Python exported with torch.export.save, data-parallel, on images, token
// files or files of tensors. `--help` lists options and settings.
//
//   mpirun -n 2 build/examples/exported_ddp --config examples/configs/exported_sample.yaml
//   torchrun --no-python --nproc-per-node=8 build/examples/exported_ddp model.path=net.pt2
//       model.loss=mse tensors.path=train.safetensors tensors.eval_path=eval.safetensors …
#include "common/exported_settings.hpp"
#include "common/image_trainer.hpp"
#include "ddp/ddp.hpp"

namespace {

using examples::ExportedData;
using examples::ExportedNet;
using examples::ExportedSettings;
using examples::LossKind;

using Model = ddp::DistributedDataParallel<ExportedNet>;

constexpr examples::ImageProgram kProgram{
    .name = "exported_ddp",
    .longer_run =
        "build/examples/exported_ddp --config examples/configs/exported_sample.yaml "
        "train.epochs=30 checkpoint.dir=runs/exported_sample_30",
    .cifar10_config = "examples/configs/exported_sample.yaml"};

/// Adds the setting to errors about the size of images.
template <typename Function>
auto with_image_size(const Function& run) {
  try {
    return run();
  } catch (const ddp::SettingsError& error) {
    throw ddp::SettingsError(std::string(error.what()) + " (images have the size data.image_size)");
  }
}

void train_images(ddp::Context& ctx, ddp::Config cfg, const ExportedSettings& settings) {
  const auto data = examples::open_image_data(cfg.data);
  auto module = examples::make_exported(settings, cfg, ctx.communicator());
  const auto dtype = module->parameters().front().scalar_type();
  if (cfg.loader.image_dtype == ddp::ImageDtype::Auto) {  // the program knows its inputs' dtype
    cfg.loader.image_dtype =
        dtype == torch::kBFloat16 ? ddp::ImageDtype::Bf16 : ddp::ImageDtype::Fp32;
  }
  Model model(module, ctx.communicator(), cfg.ddp);
  examples::ImageModel classifier{
      .model = model,
      .module = *module,
      .forward =
          [&](const at::Tensor& images) {
            const auto outputs = with_image_size([&] { return model.forward(images); });
            return examples::class_scores(outputs, settings.output, data.train->num_classes());
          },
      .ema_decay = settings.ema_decay};
  if (settings.loss == LossKind::InGraph) {
    classifier.own_loss = [&](const ddp::Batch& batch) {
      const auto outputs = with_image_size([&] { return model.forward(batch.data, batch.target); });
      return examples::loss_in_graph(outputs, settings.output);
    };
  }
  examples::train_images(ctx, cfg, data, classifier, kProgram);
  if (ctx.is_main() && !settings.save_weights.empty()) {
    ddp::save_weights(*module, settings.save_weights);
  }
}

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  const auto settings = cfg.section<ExportedSettings>("model");
  const auto tokens = cfg.section<examples::ExportedTokens>("tokens");
  const auto tensors = cfg.section<examples::TensorFiles>("tensors");
  switch (examples::choose_data(cfg, settings, tokens, tensors)) {
    case ExportedData::Images:
      return train_images(ctx, cfg, settings);
    case ExportedData::Tokens:
    case ExportedData::Tensors:
      return;
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train, examples::exported_sections());
}
