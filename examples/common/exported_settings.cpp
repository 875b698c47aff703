// SPDX-License-Identifier: Apache-2.0
#include "common/exported_settings.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <charconv>
#include <system_error>
#include <utility>

#include "common/data_path.hpp"
#include "common/exported_adapters.hpp"
#include "common/sample_trainer.hpp"
#include "ddp/core/error.hpp"
#include "ddp/data/distributed_sampler.hpp"
#include "ddp/detail/text.hpp"
#include "ddp/train/weights.hpp"

namespace examples {
namespace {

using ddp::concat;
using ddp::SettingsError;
using ddp::detail::printable;

using NamedOutput = std::pair<std::string, c10::IValue>;

std::vector<NamedOutput> named_outputs(const c10::IValue& outputs) {
  std::vector<NamedOutput> named;
  if (outputs.isGenericDict()) {
    for (const auto& entry : outputs.toGenericDict()) {
      named.emplace_back(entry.key().isString() ? entry.key().toStringRef() : concat(entry.key()),
                         entry.value());
    }
  } else if (outputs.isTuple()) {
    for (const auto& element : outputs.toTupleRef().elements()) {
      named.emplace_back(std::to_string(named.size()), element);
    }
  } else if (outputs.isList()) {
    for (const c10::IValue& element : outputs.toListRef()) {
      named.emplace_back(std::to_string(named.size()), element);
    }
  } else {
    named.emplace_back("0", outputs);
  }
  return named;
}

std::string names_of(const std::vector<NamedOutput>& outputs) {
  std::string names;
  for (const auto& [name, value] : outputs) {
    names += concat(names.empty() ? "" : ", ", printable(name),
                    value.isTensor() ? "" : concat(" (a ", value.tagKind(), ")"));
  }
  return names.empty() ? "nothing" : names;
}

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
                                 .checkpoint_blocks = settings.checkpoint_blocks});
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
  return module;
}

SettingsError with_target_hint(const ddp::MissingArgumentError& error) {
  return SettingsError(concat(error.what(), "; fix: if the program computes its loss, set ",
                              "model.loss=in_graph, which gives it the target too"));
}

void check_training_batches(const ddp::Context& ctx, const ddp::Config& cfg, int64_t num_samples,
                            const std::function<void(int64_t size)>& check) {
  if (cfg.loader.global_batch_size > 0) {
    return;  // shares of ranks and micro-batches have many sizes
  }
  const ddp::DistributedSampler sampler(num_samples, ctx.communicator(), cfg.sampler);
  const auto whole = std::min(cfg.loader.batch_size, sampler.num_samples());
  const auto last = cfg.loader.drop_last ? 0 : sampler.num_samples() % cfg.loader.batch_size;
  for (const auto size : {whole, last}) {
    try {
      if (size > 0) {
        check(size);
      }
    } catch (const ddp::InputSizeError& error) {
      throw SettingsError(concat(
          size == whole ? "a training batch of " : "the last training batch of an epoch, of ", size,
          size == 1 ? " sample: " : " samples: ", error.what(),
          size == whole ? "; train.batch_size sets the size"
                        : "; fix: loader.drop_last=true, which leaves it out"));
    }
  }
}

at::Tensor as_input(const at::Tensor& input, c10::ScalarType parameter_dtype) {
  return input.is_floating_point() ? input.to(parameter_dtype) : input;
}

at::Tensor select_output(const c10::IValue& outputs, const std::string& name) {
  const auto named = named_outputs(outputs);
  for (const auto& [key, value] : named) {
    if (name.empty() ? value.isTensor() : key == name) {
      if (value.isTensor()) {
        return value.toTensor();
      }
      throw SettingsError(concat("model.output=", name, " is a ", value.tagKind(),
                                 ", not a tensor; the program returns: ", names_of(named)));
    }
  }
  throw SettingsError(concat(name.empty() ? "the program returns no tensor at its top level"
                                          : concat("model.output=", name, " does not exist"),
                             "; the program returns: ", names_of(named),
                             "; fix: set model.output to one of them"));
}

at::Tensor loss_in_graph(const c10::IValue& outputs, const std::string& name) {
  const bool has_loss = name.empty() && outputs.isGenericDict() &&
                        outputs.toGenericDict().contains(std::string("loss"));
  const auto loss = select_output(outputs, has_loss ? "loss" : name);
  if (loss.numel() != 1 || !loss.is_floating_point()) {
    throw SettingsError(concat("model.loss=in_graph needs a scalar loss, but the output is ",
                               loss.scalar_type(), ' ', loss.sizes(),
                               "; fix: choose the loss by model.output, or another model.loss"));
  }
  return loss.reshape(at::IntArrayRef{});
}

at::Tensor class_scores(const c10::IValue& outputs, const std::string& name, int64_t num_classes) {
  const auto scores = select_output(outputs, name);
  if (scores.dim() != 2) {
    throw SettingsError(
        concat("model.loss=cross_entropy needs an output [images, classes], but it is ",
               scores.sizes(), "; fix: choose another output by model.output, or another loss"));
  }
  if (scores.size(1) < num_classes) {
    throw ddp::DataError(concat("the data has ", num_classes, " classes, but the output of ",
                                "model.path has ", scores.size(1),
                                "; fix: export a model for these classes"));
  }
  return scores;
}

}  // namespace examples
