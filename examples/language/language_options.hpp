// SPDX-License-Identifier: Apache-2.0
// Settings of the language examples, and the models that they describe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ddp/comm/context.hpp"
#include "ddp/core/fields.hpp"
#include "models/bert.hpp"
#include "models/causal_lm.hpp"
#include "models/gpt2.hpp"
#include "models/lora.hpp"
#include "models/qwen2.hpp"
#include "models/tokens/token_dataset.hpp"

namespace examples {

struct RunSettings {
  std::string mode = "train";
};
void describe_fields(RunSettings& settings, ddp::FieldVisitor& visitor);

struct Gpt2RunSettings {
  std::string mode = "train";
};
void describe_fields(Gpt2RunSettings& settings, ddp::FieldVisitor& visitor);

/// Settings that both kinds of model share.
struct LanguageModelSettings {
  std::string init = "random";
  std::string path = "";
  torch::Dtype dtype = torch::kFloat32;
  int64_t seed = 0;
  models::LanguageModelOptions computation{};
};
void describe_fields(LanguageModelSettings& settings, ddp::FieldVisitor& visitor);

struct Qwen2Settings {
  std::string size = "tiny";
  int64_t vocab_size = 0;
  bool fp8_base = false;
  LanguageModelSettings common{};
};
void describe_fields(Qwen2Settings& settings, ddp::FieldVisitor& visitor);

struct Gpt2Settings {  // defaults for the embedded text and two CPU cores
  int64_t layers = 4;
  int64_t hidden = 64;
  int64_t heads = 4;
  int64_t positions = 64;
  double dropout = 0;
  int64_t vocab_size = 0;
  LanguageModelSettings common{};
};
void describe_fields(Gpt2Settings& settings, ddp::FieldVisitor& visitor);

struct BertSettings {  // defaults for the embedded text and two CPU cores
  int64_t layers = 2;
  int64_t hidden = 64;
  int64_t heads = 4;
  int64_t positions = 64;
  double dropout = 0;            ///< of embeddings and residual branches
  double attention_dropout = 0;  ///< of attention weights
  int64_t vocab_size = 0;
  LanguageModelSettings common{};
};
void describe_fields(BertSettings& settings, ddp::FieldVisitor& visitor);

struct LoraSettings {
  models::LoraOptions options;
  std::string adapter = "";
  std::string save_dir = "";
};
/// All fields but save_dir.
void describe_adapter_fields(LoraSettings& settings, ddp::FieldVisitor& visitor);
void describe_fields(LoraSettings& settings, ddp::FieldVisitor& visitor);

/// Returns the sizes named by `size`. The vocabulary has `file_vocab` tokens if none is set and the
/// size is not a released model's.
models::Qwen2Options qwen2_options(const Qwen2Settings& settings, int64_t file_vocab);
models::Gpt2Options gpt2_options(const Gpt2Settings& settings, int64_t file_vocab);
models::BertOptions bert_options(const BertSettings& settings, int64_t file_vocab);

/// Creates the model on the context's device, with random weights or those of the Hugging Face
/// folder model.path, which the ranks of a node read together. Throws SettingsError if the sizes do
/// not fit together, or if only one of path and model.init=pretrained is set. Also throws reading
/// errors. Collective.
std::shared_ptr<models::CausalLm> make_qwen2(const Qwen2Settings& settings, int64_t file_vocab,
                                             const ddp::Context& ctx);
std::shared_ptr<models::CausalLm> make_gpt2(const Gpt2Settings& settings, int64_t file_vocab,
                                            const ddp::Context& ctx);
std::shared_ptr<models::LanguageModel> make_bert(const BertSettings& settings, int64_t file_vocab,
                                                 const ddp::Context& ctx);

/// Sets lora.options.fp8_base as in `model`. Throws SettingsError if nothing is frozen or the GPU
/// cannot multiply FP8.
void use_base_dtype(const Qwen2Settings& model, const ddp::Context& ctx, LoraSettings& lora);

/// Calls models::add_lora and loads the weights of lora.adapter (PEFT's layout) if set. With
/// lora.rank=0 it only counts the parameters. Throws SettingsError naming lora.target_modules if a
/// pattern matches nothing, MismatchError for an adapter of another rank, alpha or base.
models::LoraSummary add_adapters(torch::nn::Module& module, const LoraSettings& settings);

}  // namespace examples
