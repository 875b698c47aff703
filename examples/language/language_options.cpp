// SPDX-License-Identifier: Apache-2.0
#include "language/language_options.hpp"

#include <torch/torch.h>

#include <limits>
#include <stdexcept>
#include <utility>

#include "ddp/core/error.hpp"
#include "ddp/core/logging.hpp"
#include "models/pretrained/hf_config.hpp"
#include "models/pretrained/hf_weights.hpp"
#include "models/pretrained/peft_adapter.hpp"

namespace examples {
namespace {

const std::vector<std::pair<std::string, torch::Dtype>> kDtypes = {{"fp32", torch::kFloat32},
                                                                   {"bf16", torch::kBFloat16}};

void describe_vocab_size(int64_t& value, ddp::FieldVisitor& v) {
  v.field({.name = "vocab_size",
           .doc = "Rows of the embedding; at least the token files' vocabulary. 0: the "
                  "vocabulary of the released model if model.size names one, else that "
                  "of the token files.",
           .unit = "tokens",
           .min = 0,
           .max = 1 << 24},
          value);
}

/// The sizes of a model that GPT-2 and BERT share.
template <typename Settings>
void describe_sizes(Settings& s, ddp::FieldVisitor& v) {
  v.field({.name = "layers", .doc = "Transformer blocks.", .min = 1, .max = 1000}, s.layers);
  v.field({.name = "hidden",
           .doc = "Width of the model; a multiple of heads.",
           .min = 1,
           .max = 1 << 16},
          s.hidden);
  v.field({.name = "heads", .doc = "Attention heads.", .min = 1, .max = 1 << 12}, s.heads);
  v.field({.name = "positions",
           .doc = "Longest sequence, at least tokens.max_seq_len.",
           .unit = "tokens",
           .min = 1,
           .max = 1 << 24},
          s.positions);
}

/// Four layers for laptops and tests. Embeddings have unit length: at this width, a frozen head
/// with Hugging Face's usual 0.02 gives nearly equal logits whatever the adapters do.
models::Qwen2Options tiny_qwen2() {
  return {.vocab_size = 0,
          .hidden_size = 128,
          .intermediate_size = 256,
          .num_layers = 4,
          .num_heads = 4,
          .num_kv_heads = 2,
          .head_dim = 32,
          .max_positions = 2048,
          .rope_theta = 1e4,
          .initializer_range = 0.09};
}

/// Eight layers: large enough to learn a few thousand API calls.
models::Qwen2Options small_qwen2() {
  auto options = tiny_qwen2();
  options.hidden_size = 512;
  options.intermediate_size = 1536;
  options.num_layers = 8;
  options.num_heads = 8;
  options.num_kv_heads = 4;
  options.head_dim = 64;
  options.initializer_range = 0.044;
  return options;
}

/// Random weights, the same on any number of ranks. Later draws do not depend on their seed.
template <typename Model, typename Options>
auto make_random(const Options& options, const LanguageModelSettings& settings, at::Device device) {
  const auto context_seed = torch::randint(std::numeric_limits<int64_t>::max(), {}, torch::kLong);
  torch::manual_seed(static_cast<uint64_t>(settings.seed));
  try {
    Model model(options, torch::TensorOptions().dtype(settings.dtype).device(device));
    model->reset_parameters();
    torch::manual_seed(static_cast<uint64_t>(context_seed.item<int64_t>()));
    return model.ptr();
  } catch (const std::invalid_argument& error) {
    throw ddp::SettingsError(std::string("section model: ") + error.what());
  }
}

std::shared_ptr<models::LanguageModel> load_folder(const LanguageModelSettings& settings,
                                                   const models::HfConfig& config,
                                                   const ddp::Context& ctx) {
  std::shared_ptr<models::LanguageModel> module;
  try {
    module = models::make_language_model(
        config, torch::TensorOptions().dtype(settings.dtype).device(ctx.device()));
  } catch (const ddp::SettingsError& error) {
    throw ddp::SettingsError("model.path=" + settings.path + ": " + error.what());
  }
  const auto node = ctx.communicator()->split(ctx.node_rank(), ctx.local_rank());
  const auto load = models::load_pretrained(*module, settings.path, node.get());
  if (ctx.is_main()) {
    const double gigabytes = static_cast<double>(load.num_bytes) / 1e9;
    ddp::log_info(ddp::concat("loaded ", gigabytes, " GB from ", settings.path, " in ",
                              load.seconds, " s (", gigabytes / load.seconds, " GB/s)"));
  }
  return module;
}

std::shared_ptr<models::CausalLm> load_causal(const LanguageModelSettings& settings,
                                              const models::HfConfig& config,
                                              const ddp::Context& ctx) {
  return std::dynamic_pointer_cast<models::CausalLm>(load_folder(settings, config, ctx));
}

/// True if the weights come from model.path.
bool is_pretrained(const LanguageModelSettings& settings, int64_t vocab_size) {
  const bool pretrained = settings.init == "pretrained";
  if (pretrained && settings.path.empty()) {
    throw ddp::SettingsError(
        "model.init=pretrained needs model.path, a Hugging Face folder with config.json and "
        "safetensors; fix: set model.path, or model.init=random");
  }
  if (!pretrained && !settings.path.empty()) {
    throw ddp::SettingsError("model.path=" + settings.path +
                             " has no effect with model.init=random; fix: model.init=pretrained, "
                             "or leave model.path empty");
  }
  if (pretrained && vocab_size > 0) {
    throw ddp::SettingsError(
        ddp::concat("model.vocab_size=", vocab_size,
                    " contradicts model.init=pretrained: the vocabulary has the size in ",
                    settings.path, "/config.json; fix: leave it 0"));
  }
  return pretrained;
}

}  // namespace

void describe_fields(RunSettings& s, ddp::FieldVisitor& v) {
  v.field({.name = "mode",
           .doc = "train: train and evaluate. evaluate: only report loss, accuracy and "
                  "decoded answers of lora.adapter if set, else of the newest "
                  "checkpoint, else of the model as loaded. chat: answer prompts of token ids "
                  "from standard input with the same model; tools/chat.py talks to it in text.",
           .choices = {"train", "evaluate", "chat"}},
          s.mode);
}

void describe_fields(Gpt2RunSettings& s, ddp::FieldVisitor& v) {
  v.field({.name = "mode",
           .doc = "train: train and print samples. prompt: continue prompts of token ids from "
                  "standard input with the newest checkpoint, else with the model as loaded; "
                  "tools/chat.py talks to it in text.",
           .choices = {"train", "prompt"}},
          s.mode);
}

void describe_fields(LanguageModelSettings& s, ddp::FieldVisitor& v) {
  v.field({.name = "init",
           .doc = "random: random weights of the sizes set here. pretrained: sizes and weights "
                  "from model.path.",
           .choices = {"random", "pretrained"},
           .common = true},
          s.init);
  v.field({.name = "path",
           .doc = "Hugging Face folder with config.json and safetensors.",
           .may_differ = true,
           .common = true},
          s.path);
  v.field({.name = "dtype",
           .doc = "Dtype of the parameters. For trained bf16 parameters the optimizer keeps "
                  "float32 copies (masters)."},
          s.dtype, kDtypes);
  v.field({.name = "seed",
           .doc = "Seed for random weights; the weights are equal at any number of ranks."},
          s.seed);
  v.field({.name = "attention",
           .doc = "Attention kernel. auto: cudnn if it supports the case (not with "
                  "tokens.layout=pack), else flash, else math."},
          s.computation.attention, ddp::ops::attention_backend_names());
  v.field({.name = "loss_chunk_tokens",
           .doc = "Tokens whose logits exist at the same time. 0: all of a batch.",
           .unit = "tokens",
           .min = 0},
          s.computation.loss_chunk_tokens);
  v.field({.name = "checkpoint_every",
           .doc = "Activation checkpointing: recompute every k-th layer in the backward "
                  "to save memory (1: all). 0: none.",
           .unit = "layers",
           .min = 0},
          s.computation.checkpoint_every);
  v.field({.name = "label_smoothing",
           .doc = "Share of the target that is spread over the vocabulary, in training.",
           .min = 0,
           .max = 1},
          s.computation.label_smoothing);
  v.field({.name = "z_loss",
           .doc = "Weight of the squared logarithm of the softmax's denominator in the training "
                  "loss, which keeps logits small (PaLM: 1e-4).",
           .min = 0},
          s.computation.z_loss);
}

void describe_fields(Qwen2Settings& s, ddp::FieldVisitor& v) {
  v.field({.name = "size",
           .doc = "Sizes of a random model.",
           .choices = {"tiny", "small", "qwen2_0.5b", "qwen2_1.5b", "qwen2_7b"}},
          s.size);
  describe_vocab_size(s.vocab_size, v);
  v.field({.name = "base_dtype",
           .doc = "How the frozen weights of layers with adapters are multiplied. dtype: as they "
                  "are. fp8: in e4m3 with a scale per row, on GPUs of compute capability 9.0 (a "
                  "CPU computes the same numbers slowly); the weights stay in memory, "
                  "and their FP8 copies take as much as bf16 weights. Checkpoints and adapters "
                  "are the same."},
          s.fp8_base, {{"dtype", false}, {"fp8", true}});
  describe_fields(s.common, v);
}

void describe_fields(Gpt2Settings& s, ddp::FieldVisitor& v) {
  describe_sizes(s, v);
  v.field({.name = "dropout",
           .doc = "Dropout of embeddings, residual branches and attention weights.",
           .min = 0,
           .max = 0.99},
          s.dropout);
  describe_vocab_size(s.vocab_size, v);
  describe_fields(s.common, v);
}

void describe_fields(BertSettings& s, ddp::FieldVisitor& v) {
  describe_sizes(s, v);
  v.field({.name = "dropout",
           .doc = "Dropout of embeddings and residual branches.",
           .min = 0,
           .max = 0.99},
          s.dropout);
  v.field(
      {.name = "attention_dropout", .doc = "Dropout of attention weights.", .min = 0, .max = 0.99},
      s.attention_dropout);
  describe_vocab_size(s.vocab_size, v);
  describe_fields(s.common, v);
}

void describe_adapter_fields(LoraSettings& s, ddp::FieldVisitor& v) {
  auto& o = s.options;
  v.field({.name = "rank",
           .doc = "Rank of the adapters. 0: no adapters; the whole model is trained.",
           .min = 0,
           .max = 1 << 16},
          o.rank);
  v.field({.name = "alpha", .doc = "Scale of the adapters' output: alpha / rank.", .min = 0},
          o.alpha);
  v.field({.name = "dropout", .doc = "Dropout of the adapters' input.", .min = 0, .max = 0.99},
          o.dropout);
  v.field(
      {.name = "target_modules",
       .doc =
           "Shell patterns that match the last part of a linear layer's name, or the whole name."},
      o.target_modules);
  v.field({.name = "dtype", .doc = "Dtype of the adapters."}, o.dtype, kDtypes);
  v.field({.name = "adapter",
           .doc = "Adapters to start from, in PEFT's layout, with the same rank, alpha and layers. "
                  "Empty: new adapters.",
           .may_differ = true},
          s.adapter);
}

void describe_fields(LoraSettings& s, ddp::FieldVisitor& v) {
  describe_adapter_fields(s, v);
  v.field({.name = "save_dir",
           .doc = "Folder for adapters in PEFT's layout (with lora.rank=0: whole models "
                  "in Hugging Face format). Two folders are written there: best "
                  "(smallest evaluation loss) and last. Empty: checkpoint.dir/adapters "
                  "(whole model: checkpoint.dir/models). Without checkpoint.dir nothing "
                  "is written. Files of another run are never replaced.",
           .may_differ = true},
          s.save_dir);
}

models::Qwen2Options qwen2_options(const Qwen2Settings& settings, int64_t file_vocab) {
  auto options = settings.size == "qwen2_0.5b"   ? models::qwen2_0_5b()
                 : settings.size == "qwen2_1.5b" ? models::qwen2_1_5b()
                 : settings.size == "qwen2_7b"   ? models::qwen2_7b()
                 : settings.size == "small"      ? small_qwen2()
                                                 : tiny_qwen2();
  if (settings.vocab_size > 0) {
    options.vocab_size = settings.vocab_size;
  } else if (options.vocab_size == 0) {
    options.vocab_size = file_vocab;
  }
  return options;
}

models::Gpt2Options gpt2_options(const Gpt2Settings& settings, int64_t file_vocab) {
  if (settings.hidden % settings.heads != 0) {
    throw ddp::SettingsError(ddp::concat("model.hidden=", settings.hidden,
                                         " is not a multiple of model.heads=", settings.heads));
  }
  return {.vocab_size = settings.vocab_size > 0 ? settings.vocab_size : file_vocab,
          .max_positions = settings.positions,
          .hidden_size = settings.hidden,
          .num_layers = settings.layers,
          .num_heads = settings.heads,
          .dropout = settings.dropout};
}

std::shared_ptr<models::CausalLm> make_qwen2(const Qwen2Settings& settings, int64_t file_vocab,
                                             const ddp::Context& ctx) {
  std::shared_ptr<models::CausalLm> module =
      is_pretrained(settings.common, settings.vocab_size)
          ? load_causal(settings.common,
                        models::make_hf_config(models::read_qwen2_config(settings.common.path),
                                               settings.common.dtype),
                        ctx)
          : make_random<models::Qwen2>(qwen2_options(settings, file_vocab), settings.common,
                                       ctx.device());
  module->computation() = settings.common.computation;
  return module;
}

/// The file's sizes with this run's dropout.
static models::HfConfig gpt2_folder_config(const Gpt2Settings& settings) {
  auto options = models::read_gpt2_config(settings.common.path);
  options.dropout = settings.dropout;
  return models::make_hf_config(options, settings.common.dtype);
}

std::shared_ptr<models::CausalLm> make_gpt2(const Gpt2Settings& settings, int64_t file_vocab,
                                            const ddp::Context& ctx) {
  std::shared_ptr<models::CausalLm> module =
      is_pretrained(settings.common, settings.vocab_size)
          ? load_causal(settings.common, gpt2_folder_config(settings), ctx)
          : make_random<models::Gpt2>(gpt2_options(settings, file_vocab), settings.common,
                                      ctx.device());
  module->computation() = settings.common.computation;
  return module;
}

models::BertOptions bert_options(const BertSettings& settings, int64_t file_vocab) {
  if (settings.hidden % settings.heads != 0) {
    throw ddp::SettingsError(ddp::concat("model.hidden=", settings.hidden,
                                         " is not a multiple of model.heads=", settings.heads));
  }
  return {.vocab_size = settings.vocab_size > 0 ? settings.vocab_size : file_vocab,
          .max_positions = settings.positions,
          .hidden_size = settings.hidden,
          .num_layers = settings.layers,
          .num_heads = settings.heads,
          .hidden_dropout = settings.dropout,
          .attention_dropout = settings.attention_dropout};
}

/// The file's sizes with this run's dropout.
static models::HfConfig bert_folder_config(const BertSettings& settings) {
  auto options = models::read_bert_config(settings.common.path);
  options.hidden_dropout = settings.dropout;
  options.attention_dropout = settings.attention_dropout;
  return models::make_hf_config(options, settings.common.dtype);
}

std::shared_ptr<models::LanguageModel> make_bert(const BertSettings& settings, int64_t file_vocab,
                                                 const ddp::Context& ctx) {
  std::shared_ptr<models::LanguageModel> module =
      is_pretrained(settings.common, settings.vocab_size)
          ? load_folder(settings.common, bert_folder_config(settings), ctx)
          : make_random<models::Bert>(bert_options(settings, file_vocab), settings.common,
                                      ctx.device());
  module->computation() = settings.common.computation;
  return module;
}

void use_base_dtype(const Qwen2Settings& model, const ddp::Context& ctx, LoraSettings& lora) {
  lora.options.fp8_base = model.fp8_base;
  if (model.fp8_base && lora.options.rank == 0) {
    throw ddp::SettingsError(
        "model.base_dtype=fp8 is for frozen weights, but lora.rank=0 trains the whole model; fix: "
        "set lora.rank, or model.base_dtype=dtype");
  }
  if (model.fp8_base && ctx.device().is_cuda() && !ddp::ops::multiplies_fp8(ctx.device())) {
    throw ddp::SettingsError(
        "model.base_dtype=fp8 needs a GPU of compute capability 9.0, for products with a "
        "scale per row; fix: model.base_dtype=dtype with model.dtype=bf16");
  }
}

models::LoraSummary add_adapters(torch::nn::Module& module, const LoraSettings& settings) {
  if (settings.options.rank == 0) {
    if (!settings.adapter.empty()) {
      throw ddp::SettingsError("lora.adapter=" + settings.adapter +
                               " has no effect with lora.rank=0, which trains the whole model; "
                               "fix: set lora.rank, or leave lora.adapter empty");
    }
    models::LoraSummary summary;
    for (const auto& parameter : module.parameters()) {
      summary.num_trainable += parameter.numel();
    }
    return summary;
  }
  try {
    const auto summary = models::add_lora(module, settings.options);
    if (!settings.adapter.empty()) {
      models::load_adapter(module, settings.adapter);
    }
    return summary;
  } catch (const std::invalid_argument& error) {
    throw ddp::SettingsError(std::string("section lora: ") + error.what());
  }
}

}  // namespace examples
