// SPDX-License-Identifier: Apache-2.0
// Hugging Face's config.json: which model a folder holds, in our options, and the reverse.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "models/gpt2.hpp"
#include "models/qwen2.hpp"

namespace models {

/// What config.json says of a causal language model.
struct HfConfig {
  std::string model_type;  ///< qwen2, llama, mistral or gpt2
  std::variant<Qwen2Options, Gpt2Options> options;
  std::optional<at::ScalarType> dtype{};  ///< of the weights; unset where the file does not say
  std::optional<int64_t> bos_token_id{};
  std::vector<int64_t> eos_token_ids{};  ///< the tokens that end a text; empty: not said
};

/// Reads `path`, or `path`/config.json where `path` is a folder. Understands model_type qwen2,
/// llama and mistral (full attention, or a sliding window that max_position_embeddings never
/// reaches) and gpt2; rotary positions plain, "linear" or "llama3", as rope_theta and rope_scaling
/// or as the rope_parameters of transformers 5. What the file leaves out has transformers' default,
/// except sizes, which it must name.
///
/// Throws ddp::ReadError (exit code 74) naming file and key where a key is missing, of another type
/// or out of range (sizes too: width 131,072, 4,096 layers, …), or sizes do not fit together;
/// ddp::SettingsError (64) where the file is sound but asks for what these models do not have:
/// another architecture, another rope scaling or activation, a sliding window in use, quantized
/// weights, dropout inside of attention (qwen2 and its like), an untied GPT-2.
HfConfig read_hf_config(const std::string& path);

/// The same for a model that must be of one kind; throws ddp::SettingsError where it is the other.
Qwen2Options read_qwen2_config(const std::string& path);
Gpt2Options read_gpt2_config(const std::string& path);

/// `config` as a config.json that transformers 4 and 5 load. Options of model_type qwen2, llama or
/// mistral that this type cannot express (see hf_model_type) throw ddp::SettingsError.
std::string hf_config_json(const HfConfig& config);
/// Writes that as `folder`/config.json, atomically; throws ddp::WriteError.
void write_hf_config(const std::string& folder, const HfConfig& config);

/// The model_type whose biases are those of `options`: qwen2 with biases on q, k, v alone, else
/// llama. Throws ddp::SettingsError where Hugging Face has none with these.
std::string hf_model_type(const Qwen2Options& options);
HfConfig make_hf_config(const Qwen2Options& options, at::ScalarType dtype);
HfConfig make_hf_config(const Gpt2Options& options, at::ScalarType dtype);

/// The model, its parameters where `tensor_options` say and not initialised. Throws
/// ddp::SettingsError where they do not fit the memory there.
std::shared_ptr<CausalLm> make_causal_lm(const HfConfig& config,
                                         const torch::TensorOptions& tensor_options = {});

}  // namespace models
