// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>

#include "ddp/core/error.hpp"
#include "ddp/detail/files.hpp"
#include "models/pretrained/hf_config.hpp"

namespace models {
namespace {

using OrderedJson = nlohmann::ordered_json;

const char* dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    default:
      throw ddp::SettingsError(std::string("a model of ") + at::toString(dtype) +
                               " cannot be saved; float32, bfloat16 and float16 can");
  }
}

// transformers 4 reads rope_theta and rope_scaling, transformers 5 prefers rope_parameters.
void add_rope(OrderedJson& json, const Qwen2Options& options) {
  const auto& rope = options.rope_scaling;
  OrderedJson scaling;
  if (rope.scaling != "none") {
    scaling["rope_type"] = rope.scaling;
    scaling["factor"] = rope.factor;
  }
  if (rope.scaling == "llama3") {
    scaling["low_freq_factor"] = rope.low_freq_factor;
    scaling["high_freq_factor"] = rope.high_freq_factor;
    scaling["original_max_position_embeddings"] = rope.original_max_positions;
  }
  json["rope_theta"] = options.rope_theta;
  json["rope_scaling"] = scaling;  // null if there is none
  OrderedJson parameters = scaling.is_null() ? OrderedJson{{"rope_type", "default"}} : scaling;
  parameters["rope_theta"] = options.rope_theta;
  json["rope_parameters"] = parameters;
}

void add_qwen2(OrderedJson& json, const Qwen2Options& options, const std::string& model_type) {
  json["vocab_size"] = options.vocab_size;
  json["hidden_size"] = options.hidden_size;
  json["intermediate_size"] = options.intermediate_size;
  json["num_hidden_layers"] = options.num_layers;
  json["num_attention_heads"] = options.num_heads;
  json["num_key_value_heads"] = options.num_kv_heads;
  json["head_dim"] = options.head_dim;
  json["max_position_embeddings"] = options.max_positions;
  json["rms_norm_eps"] = options.rms_norm_eps;
  json["hidden_act"] = "silu";
  json["initializer_range"] = options.initializer_range;
  json["tie_word_embeddings"] = options.tie_word_embeddings;
  json["attention_dropout"] = 0.0;
  add_rope(json, options);
  if (model_type == "llama") {
    json["attention_bias"] = options.qkv_bias;
    json["mlp_bias"] = options.mlp_bias;
  } else if (model_type == "mistral") {
    json["sliding_window"] = nullptr;
  } else {
    json["use_sliding_window"] = false;
  }
}

void add_gpt2(OrderedJson& json, const Gpt2Options& options) {
  json["vocab_size"] = options.vocab_size;
  json["n_positions"] = options.max_positions;
  json["n_embd"] = options.hidden_size;
  json["n_layer"] = options.num_layers;
  json["n_head"] = options.num_heads;
  json["n_inner"] =
      options.intermediate_size == 0 ? OrderedJson() : OrderedJson(options.intermediate_size);
  json["activation_function"] = "gelu_new";
  for (const char* key : {"resid_pdrop", "embd_pdrop", "attn_pdrop"}) {
    json[key] = options.dropout;
  }
  json["layer_norm_epsilon"] = options.layer_norm_eps;
  json["initializer_range"] = options.initializer_range;
  json["tie_word_embeddings"] = true;
}

void add_bert(OrderedJson& json, const BertOptions& options) {
  json["vocab_size"] = options.vocab_size;
  json["max_position_embeddings"] = options.max_positions;
  json["type_vocab_size"] = options.num_token_types;
  json["hidden_size"] = options.hidden_size;
  json["num_hidden_layers"] = options.num_layers;
  json["num_attention_heads"] = options.num_heads;
  json["intermediate_size"] = options.intermediate_size;
  json["hidden_act"] = "gelu";
  json["hidden_dropout_prob"] = options.hidden_dropout;
  json["attention_probs_dropout_prob"] = options.attention_dropout;
  json["layer_norm_eps"] = options.layer_norm_eps;
  json["initializer_range"] = options.initializer_range;
  json["pad_token_id"] =
      options.pad_token_id < 0 ? OrderedJson() : OrderedJson(options.pad_token_id);
  json["position_embedding_type"] = "absolute";
  json["tie_word_embeddings"] = true;
}

bool has_biases_of(const Qwen2Options& options, const std::string& model_type) {
  if (model_type == "qwen2") {
    return options.qkv_bias && !options.o_bias && !options.mlp_bias;
  }
  if (model_type == "mistral") {
    return !options.qkv_bias && !options.o_bias && !options.mlp_bias;
  }
  return model_type == "llama" && options.qkv_bias == options.o_bias;
}

const char* class_name(const std::string& model_type) {
  return model_type == "qwen2"     ? "Qwen2ForCausalLM"
         : model_type == "llama"   ? "LlamaForCausalLM"
         : model_type == "mistral" ? "MistralForCausalLM"
         : model_type == "bert"    ? "BertForMaskedLM"
                                   : "GPT2LMHeadModel";
}

}  // namespace

std::string hf_model_type(const Qwen2Options& options) {
  if (has_biases_of(options, "qwen2")) {
    return "qwen2";
  }
  if (has_biases_of(options, "llama")) {
    // transformers refuses a Llama whose hidden_size is not a multiple of its heads, even with a
    // head_dim.
    const bool divides = options.hidden_size % options.num_heads == 0;
    return divides || !has_biases_of(options, "mistral") ? "llama" : "mistral";
  }
  throw ddp::SettingsError(
      "Hugging Face has no model type with the biases of this model; supported are biases on q, k "
      "and v alone (qwen2), or on all or none of attention and on all or none of the MLP (llama)");
}

HfConfig make_hf_config(const Qwen2Options& options, at::ScalarType dtype) {
  return {.model_type = hf_model_type(options), .options = options, .dtype = dtype};
}

HfConfig make_hf_config(const Gpt2Options& options, at::ScalarType dtype) {
  return {.model_type = "gpt2", .options = options, .dtype = dtype};
}

HfConfig make_hf_config(const BertOptions& options, at::ScalarType dtype) {
  return {.model_type = "bert", .options = options, .dtype = dtype};
}

std::string hf_config_json(const HfConfig& config) {
  OrderedJson json;
  json["architectures"] = {class_name(config.model_type)};
  json["model_type"] = config.model_type;
  if (const auto* qwen2 = std::get_if<Qwen2Options>(&config.options)) {
    if (!has_biases_of(*qwen2, config.model_type)) {
      throw ddp::SettingsError("a model of model_type \"" + config.model_type +
                               "\" cannot have the biases of these options");
    }
    add_qwen2(json, *qwen2, config.model_type);
  } else if (const auto* gpt2 = std::get_if<Gpt2Options>(&config.options)) {
    add_gpt2(json, *gpt2);
  } else {
    add_bert(json, std::get<BertOptions>(config.options));
  }
  if (config.dtype) {
    json["torch_dtype"] = dtype_name(*config.dtype);  // transformers 5 reads it as "dtype"
  }
  // Without these keys transformers would assume 50256 for GPT-2 and 1 and 2 for Llama.
  json["bos_token_id"] = config.bos_token_id ? OrderedJson(*config.bos_token_id) : OrderedJson();
  const auto& ends = config.eos_token_ids;
  json["eos_token_id"] = ends.empty()       ? OrderedJson()
                         : ends.size() == 1 ? OrderedJson(ends[0])
                                            : OrderedJson(ends);
  json["use_cache"] = true;
  return json.dump(2) + "\n";
}

void write_hf_config(const std::string& folder, const HfConfig& config) {
  ddp::replace_file(ddp::system_file_ops(), folder + "/config.json", {hf_config_json(config)});
}

}  // namespace models
