// SPDX-License-Identifier: Apache-2.0
// Converts Hugging Face's config.json to our model options and back.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "models/bert.hpp"
#include "models/gpt2.hpp"
#include "models/qwen2.hpp"

namespace models {

/// Contents of config.json for a language model.
struct HfConfig {
  std::string model_type;  ///< qwen2, llama, mistral, gpt2 or bert
  std::variant<Qwen2Options, Gpt2Options, BertOptions> options;  ///< of the kind of model
  std::optional<at::ScalarType> dtype{};  ///< dtype of the weights; unset if the file has none
  std::optional<int64_t> bos_token_id{};  ///< token that begins a text
  std::vector<int64_t> eos_token_ids{};   ///< tokens that end a text; empty: none given
};

/// Reads `path`, or `path`/config.json if `path` is a folder. Supports model_type gpt2, bert,
/// qwen2, llama and mistral (full attention, or a sliding window that max_position_embeddings never
/// reaches). Rotary positions may be plain, "linear" or "llama3", given as rope_theta and
/// rope_scaling or as the rope_parameters of transformers 5. Missing keys get transformers'
/// defaults, except sizes, which are required.
///
/// Throws ddp::ReadError (exit code 74) naming file and key if a key is missing, of another type or
/// out of range (sizes too: width 131,072, 4,096 layers, …), or if sizes do not fit together.
/// Throws ddp::SettingsError (64) if the file is valid but asks for an unsupported feature: another
/// architecture, another rope scaling or activation, a sliding window in use, quantized weights,
/// dropout inside attention (qwen2, llama, mistral), an untied GPT-2 or BERT, a BERT
/// decoder.
HfConfig read_hf_config(const std::string& path);

/// Reads the options of one kind of model; throws ddp::SettingsError if the file is of the other.
Qwen2Options read_qwen2_config(const std::string& path);
Gpt2Options read_gpt2_config(const std::string& path);  ///< see read_qwen2_config()
BertOptions read_bert_config(const std::string& path);  ///< see read_qwen2_config()

/// Returns `config` as a config.json that transformers 4 and 5 load. Throws ddp::SettingsError if
/// its model_type cannot express the options (see hf_model_type).
std::string hf_config_json(const HfConfig& config);
/// Writes hf_config_json() to `folder`/config.json atomically; throws ddp::WriteError.
void write_hf_config(const std::string& folder, const HfConfig& config);

/// The model_type whose biases match `options`: qwen2 with biases on q, k, v alone, else llama.
/// Throws ddp::SettingsError if Hugging Face has no model_type for them.
std::string hf_model_type(const Qwen2Options& options);
/// The HfConfig of a model made here, without tokens.
HfConfig make_hf_config(const Qwen2Options& options, at::ScalarType dtype);
HfConfig make_hf_config(const Gpt2Options& options, at::ScalarType dtype);
HfConfig make_hf_config(const BertOptions& options, at::ScalarType dtype);

/// Creates the model with uninitialised parameters on `tensor_options`. Throws ddp::SettingsError
/// if they do not fit into the memory there.
std::shared_ptr<LanguageModel> make_language_model(const HfConfig& config,
                                                   const torch::TensorOptions& tensor_options = {});
/// The same for a causal model; throws ddp::SettingsError for another kind.
std::shared_ptr<CausalLm> make_causal_lm(const HfConfig& config,
                                         const torch::TensorOptions& tensor_options = {});

}  // namespace models
