// SPDX-License-Identifier: Apache-2.0
#include "exported/exported_settings.hpp"

#include <torch/torch.h>

#include "common/data_path.hpp"
#include "common/sample_trainer.hpp"
#include "ddp/core/error.hpp"
#include "ddp/reduce/sync_batch_norm.hpp"
#include "ddp/train/weights.hpp"
#include "exported/exported_adapters.hpp"

namespace examples {
namespace {

using ddp::concat;
using ddp::SettingsError;

void refuse(bool is_set, const char* setting, const std::string& why, const char* fix) {
  if (is_set) {
    throw SettingsError(concat(setting, " has no effect ", why, "; fix: ", fix));
  }
}

}  // namespace

void describe_fields(ExportedSettings& s, ddp::FieldVisitor& v) {
  v.field({.name = "path",
           .doc = "The archive that torch.export.save wrote (.pt2). Required.",
           .common = true},
          s.path);
  v.field({.name = "libraries",
           .doc = "Shared objects that register custom operators. They are loaded first."},
          s.libraries);
  v.field({.name = "checkpoint_blocks",
           .doc = "Modules of Python whose activations are computed again in the backward instead "
                  "of kept: patterns such as layers.*"},
          s.checkpoint_blocks);
  v.field({.name = "fuse",
           .doc = "Run chains of operators as ops of ddp::ops (docs/exported_fusion.md). false: as "
                  "exported, for comparison, or to differentiate a gradient again."},
          s.fuse);
  v.field({.name = "loss",
           .doc = "Of the output and the target. bce: binary cross entropy with logits. in_graph: "
                  "the program gets the target too and returns the mean loss.",
           .common = true},
          s.loss, loss_names());
  v.field({.name = "output",
           .doc = "Output that the loss uses, if the program returns several: an index, or a key "
                  "of a dict. Empty: the first tensor; with in_graph the key loss, if any."},
          s.output);
  v.field({.name = "dtype",
           .doc = "Dtype of the parameters. archive: as exported. Others are refused if the "
                  "program names dtypes. For bf16 parameters the optimizer keeps float32 copies."},
          s.dtype,
          {{"archive", std::nullopt}, {"fp32", torch::kFloat32}, {"bf16", torch::kBFloat16}});
  v.field({.name = "weights",
           .doc = "Initial weights: a safetensors file with Python's names. Empty: the archive's."},
          s.weights);
  v.field({.name = "save_weights",
           .doc = "File for the trained weights, which Python's load_state_dict takes from "
                  "safetensors.torch.load_file. Adapters of section lora are merged into them. "
                  "With model.ema_decay the file has the averages. Empty: none."},
          s.save_weights);
  v.field({.name = "sync_batch_norm", .doc = "Compute batch statistics over all ranks."},
          s.sync_batch_norm);
  describe_ema_decay(s.ema_decay, v);
}

ExportedTokens::ExportedTokens() {
  path = "";
  layout = models::TokenLayout::Stream;
}

std::vector<ddp::Section> exported_sections() {
  return {ddp::declare_section<ExportedSettings>("model", "The exported program and its loss."),
          ddp::declare_section<ExportedTokens>("tokens",
                                               "Token files, for programs that predict the next "
                                               "token."),
          ddp::declare_section<TensorFiles>("tensors", "Files of tensors, for any program."),
          ddp::declare_section<ExportedLora>("lora", "Adapters on the program's linear layers."),
          ddp::uses({"train"})};
}

ExportedData choose_data(const ddp::Config& cfg, const ExportedSettings& model,
                         const ExportedTokens& tokens, const TensorFiles& tensors) {
  if (model.path.empty()) {
    throw SettingsError(
        "model.path is empty; fix: set it to an archive that torch.export.save wrote");
  }
  if (!tokens.path.empty() && !tensors.path.empty()) {
    throw SettingsError(concat("tokens.path=", tokens.path, " and tensors.path=", tensors.path,
                               " are two kinds of data; fix: set one"));
  }
  const auto data = !tokens.path.empty()    ? ExportedData::Tokens
                    : !tensors.path.empty() ? ExportedData::Tensors
                                            : ExportedData::Images;
  const auto loss = "with model.loss=" + name_of(model.loss);
  const bool has_classes = model.loss == LossKind::CrossEntropy;
  if (data != ExportedData::Tensors && !has_classes && model.loss != LossKind::InGraph) {
    throw SettingsError(concat("model.loss=", name_of(model.loss), " needs the targets of a file, ",
                               "but images and tokens have classes; fix: model.loss=cross_entropy, "
                               "model.loss=in_graph, or tensors.path"));
  }
  const bool mixes = cfg.train.mixup > 0 || cfg.train.cutmix > 0;
  refuse(mixes && (data != ExportedData::Images || !has_classes), "train.mixup or train.cutmix",
         data == ExportedData::Images ? loss : "without images", "set it to 0");
  refuse(cfg.train.label_smoothing > 0 && data == ExportedData::Tokens, "train.label_smoothing",
         "with tokens", "set it to 0");
  check_loss_settings(model.loss, cfg);
  if (data == ExportedData::Tokens && model.ema_decay > 0) {
    throw SettingsError("model.ema_decay is not available for tokens; fix: set it to 0");
  }
  if (data == ExportedData::Tokens && tokens.layout == models::TokenLayout::Pack) {
    throw SettingsError(
        "tokens.layout=pack needs attention that separates documents, which an exported program "
        "does not have; fix: tokens.layout=stream or pad");
  }
  return data;
}

ddp::ExportedModule make_exported(const ExportedSettings& settings, const ddp::Config& cfg,
                                  const ddp::CommunicatorPtr& communicator) {
  ddp::ExportedModule module(
      find_data_path(settings.path),
      ddp::ExportedModuleOptions{.libraries = settings.libraries,
                                 .checkpoint_blocks = settings.checkpoint_blocks,
                                 .fuse = settings.fuse});
  if (module->parameters().empty()) {
    throw SettingsError(settings.path + " has no parameters to train");
  }
  if (cfg.train.eval_every > 0 || cfg.train.eval_every_steps > 0 || cfg.train.eval_first) {
    module->eval();  // refuses now, not after an epoch
  }
  module->train();
  if (!settings.weights.empty() && communicator->rank() == 0) {
    ddp::load_weights(*module, settings.weights);
  }
  if (settings.dtype) {
    module->to(communicator->device(), *settings.dtype);
  } else {
    module->to(communicator->device());
  }
  if (settings.sync_batch_norm) {
    ddp::convert_sync_batchnorm(*module, communicator);
  }
  return module;
}

}  // namespace examples
