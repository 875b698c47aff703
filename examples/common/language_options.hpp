// SPDX-License-Identifier: Apache-2.0
// Sections of the language examples: model (Qwen2Settings of lora_ddp, Gpt2Settings of gpt2_ddp),
// lora, run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "ddp/comm/context.hpp"
#include "ddp/core/fields.hpp"
#include "models/causal_lm.hpp"
#include "models/gpt2.hpp"
#include "models/lora.hpp"
#include "models/qwen2.hpp"

namespace examples {

struct RunSettings {
  std::string mode = "train";
};
void describe_fields(RunSettings& settings, ddp::FieldVisitor& visitor);

/// What both kinds of model have.
struct LanguageModelSettings {
  std::string init = "random";
  std::string path = "";
  torch::Dtype dtype = torch::kFloat32;
  int64_t seed = 0;
  models::CausalLmOptions computation{};
};
void describe_fields(LanguageModelSettings& settings, ddp::FieldVisitor& visitor);

struct Qwen2Settings {
  std::string size = "tiny";
  int64_t vocab_size = 0;
  LanguageModelSettings common{};
};
void describe_fields(Qwen2Settings& settings, ddp::FieldVisitor& visitor);

struct Gpt2Settings {  // one for the embedded text and two CPU cores
  int64_t layers = 4;
  int64_t hidden = 64;
  int64_t heads = 4;
  int64_t positions = 64;
  double dropout = 0;
  int64_t vocab_size = 0;
  LanguageModelSettings common{};
};
void describe_fields(Gpt2Settings& settings, ddp::FieldVisitor& visitor);

struct LoraSettings {
  models::LoraOptions options;
  std::string adapter = "";
  std::string save_dir = "";
};
void describe_fields(LoraSettings& settings, ddp::FieldVisitor& visitor);

/// The sizes that `size` names; a vocabulary of `file_vocab` tokens where none is set and the size
/// is no released model's.
models::Qwen2Options qwen2_options(const Qwen2Settings& settings, int64_t file_vocab);
models::Gpt2Options gpt2_options(const Gpt2Settings& settings, int64_t file_vocab);

/// The model on the context's device, with weights: random ones, or those of the Hugging Face
/// folder model.path, which the ranks of a node read together. Throws SettingsError for sizes that
/// do not fit together and a path without model.init=pretrained or the reverse; what reading
/// throws. Collective.
std::shared_ptr<models::CausalLm> make_qwen2(const Qwen2Settings& settings, int64_t file_vocab,
                                             const ddp::Context& ctx);
std::shared_ptr<models::CausalLm> make_gpt2(const Gpt2Settings& settings, int64_t file_vocab,
                                            const ddp::Context& ctx);

/// With lora.rank=0 nothing but a count. Else models::add_lora and, where lora.adapter names one,
/// the weights of an adapter in PEFT's layout. Throws SettingsError naming lora.target_modules
/// where a pattern matches nothing, MismatchError for an adapter of another rank, alpha or base.
models::LoraSummary add_adapters(models::CausalLm& module, const LoraSettings& settings);

}  // namespace examples
