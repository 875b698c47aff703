// SPDX-License-Identifier: Apache-2.0
// Trains any model that Python exported with torch.export.save, data-parallel, on images, token
// files or files of tensors. `--help` lists options and settings.
//
//   mpirun -n 2 build/examples/exported_ddp --config examples/configs/exported_sample.yaml
//   torchrun --no-python --nproc-per-node=8 build/examples/exported_ddp model.path=net.pt2
//       model.loss=mse tensors.path=train.safetensors tensors.eval_path=eval.safetensors …
#include <torch/torch.h>

#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "ddp/ddp.hpp"
#include "exported/exported_adapters.hpp"
#include "exported/exported_language.hpp"
#include "exported/exported_settings.hpp"
#include "images/image_trainer.hpp"
#include "tensors/model_call.hpp"
#include "tensors/tensor_trainer.hpp"

namespace {

using examples::ExportedData;
using examples::ExportedSettings;
using examples::LossKind;

using Model = ddp::DistributedDataParallel<ddp::ExportedModule>;

constexpr examples::ImageProgram kProgram{
    .name = "exported_ddp",
    .longer_run =
        "build/examples/exported_ddp --config examples/configs/exported_sample.yaml "
        "train.epochs=30 checkpoint.dir=runs/exported_sample_30",
    .cifar10_config = "examples/configs/exported_sample.yaml"};

struct Run {
  ExportedSettings settings;
  examples::ExportedLora lora;
};

ddp::ExportedModule make_module(const ddp::Context& ctx, const ddp::Config& cfg, const Run& run) {
  auto module = examples::make_exported(run.settings, cfg, ctx.communicator());
  examples::add_adapters(module, run.settings, run.lora, ctx);
  return module;
}

/// A forward of images, which get the parameters' dtype. Adds the settings to errors about their
/// sizes.
template <typename Net, typename... Targets>
c10::IValue forward_images(Net& net, const at::Tensor& images, c10::ScalarType dtype,
                           const Targets&... targets) {
  try {
    return net.forward(examples::as_input(images, dtype), targets...);
  } catch (const ddp::MissingArgumentError& error) {
    throw examples::with_target_hint(error);
  } catch (const ddp::InputSizeError& error) {
    throw ddp::SettingsError(std::string(error.what()) +
                             " (data.image_size and data.channels set the shape of images)");
  }
}

void train_images(ddp::Context& ctx, ddp::Config cfg, const Run& run) {
  const auto& settings = run.settings;
  const auto data = examples::open_image_data(cfg.data);
  auto module = make_module(ctx, cfg, run);
  const auto dtype = module->parameters().front().scalar_type();
  if (cfg.loader.image_dtype == ddp::ImageDtype::Auto) {  // the program knows its inputs' dtype
    cfg.loader.image_dtype =
        dtype == torch::kBFloat16 ? ddp::ImageDtype::Bf16 : ddp::ImageDtype::Fp32;
  }
  Model model(module, ctx.communicator(), cfg.ddp);
  const auto scores = [&](const c10::IValue& outputs) {
    return examples::class_scores(outputs, settings.output, data.train->num_classes());
  };
  const auto loss = [&](const c10::IValue& outputs) {
    return examples::loss_in_graph(outputs, settings.output);
  };
  examples::ImageModel classifier{
      .model = model,
      .module = *module,
      .forward =
          [&](const at::Tensor& images) { return scores(forward_images(model, images, dtype)); },
      .ema_decay = settings.ema_decay,
      .save_trained = [&] { examples::save_trained(module, settings, run.lora, ctx); }};
  const bool in_graph = settings.loss == LossKind::InGraph;
  if (in_graph) {
    classifier.own_loss = [&](const ddp::Batch& batch) {
      return loss(forward_images(model, batch.data, dtype, batch.target));
    };
  }
  const auto zeros = [&](int64_t size) {
    auto shape = data.test->layout().value().shape;
    shape.insert(shape.begin(), size);
    return torch::zeros(shape, at::TensorOptions(ctx.device()));
  };
  const auto zero_targets = [&](int64_t size) {
    return torch::zeros({size}, at::TensorOptions(ctx.device()).dtype(torch::kInt64));
  };
  examples::rehearse_evaluation(ctx, cfg, *module, data.test->size(), [&](int64_t size) {
    const auto images = zeros(size), target = zero_targets(size);
    return in_graph ? loss(forward_images(*module, images, dtype, target))
                    : scores(forward_images(*module, images, dtype));
  });
  examples::check_training_batches(ctx, cfg, data.train->size(), [&](int64_t size) {
    std::vector<c10::IValue> arguments{examples::as_input(zeros(size), dtype)};
    if (in_graph) {
      arguments.emplace_back(zero_targets(size));
    }
    module->check_call(arguments);
  });
  examples::train_images(ctx, cfg, data, classifier, kProgram);
}

void train_tokens(ddp::Context& ctx, const ddp::Config& cfg, const Run& run,
                  const examples::ExportedTokens& tokens) {
  const auto& settings = run.settings;
  const auto data = examples::open_token_data(tokens);
  const auto module = make_module(ctx, cfg, run);
  if (ctx.is_main()) {
    std::cout << data.train->summary() << '\n' << data.eval->summary() << '\n' << std::flush;
  }
  examples::LanguageTrainer trainer(
      ctx, cfg, examples::wrap_exported(ctx, cfg, module, settings, data), data);
  const auto summary = trainer.train();
  if (ctx.is_main()) {
    std::cout << examples::language_report(summary, trainer, ctx, cfg) << std::flush;
  }
  examples::save_trained(module, settings, run.lora, ctx);
}

void train_tensors(ddp::Context& ctx, const ddp::Config& cfg, const Run& run,
                   const examples::TensorFiles& files) {
  const auto& settings = run.settings;
  const auto data = examples::open_tensors(files, settings.loss);
  auto module = make_module(ctx, cfg, run);
  Model model(module, ctx.communicator(), cfg.ddp);
  using Arguments = std::map<std::string, c10::IValue>;
  const auto report = examples::train_tensors(
      ctx, cfg, data,
      {.model = model,
       .module = *module,
       .ema_decay = settings.ema_decay,
       .save_trained = [&] { examples::save_trained(module, settings, run.lora, ctx); }},
      {.wrapper = [&](const Arguments& arguments) { return model.forward(arguments); },
       .module = [&](const Arguments& arguments) { return module->forward(arguments); },
       .check = [&](const Arguments& arguments) { module->check_call({}, arguments); },
       .output = settings.output});
  if (ctx.is_main()) {
    std::cout << examples::sample_report(
                     report, data.facts.num_per_sample > 1 ? "labels" : "samples", "", ctx, cfg)
              << std::flush;
  }
}

void train(ddp::Context& ctx, const ddp::Config& cfg) {
  const Run run{.settings = cfg.section<ExportedSettings>("model"),
                .lora = cfg.section<examples::ExportedLora>("lora")};
  const auto tokens = cfg.section<examples::ExportedTokens>("tokens");
  const auto tensors = cfg.section<examples::TensorFiles>("tensors");
  switch (examples::choose_data(cfg, run.settings, tokens, tensors)) {
    case ExportedData::Images:
      return train_images(ctx, cfg, run);
    case ExportedData::Tokens:
      return train_tokens(ctx, cfg, run, tokens);
    case ExportedData::Tensors:
      return train_tensors(ctx, cfg, run, tensors);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return ddp::run(argc, argv, train, examples::exported_sections());
}
