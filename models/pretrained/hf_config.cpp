// SPDX-License-Identifier: Apache-2.0
#include "models/pretrained/hf_config.hpp"

#include <algorithm>
#include <filesystem>
#include <limits>

#include "ddp/core/error.hpp"
#include "pretrained/json_file.hpp"

namespace models {
namespace {

using ddp::concat;
using detail::JsonObject;

constexpr int64_t kMaxSize = int64_t{1} << 31;
constexpr double kMaxNumber = std::numeric_limits<double>::max();
constexpr const char* kSupported = "qwen2, llama, mistral, gpt2 and bert are supported";

// The limits are several times the sizes of released models, and products of sizes fit int64. A
// larger size indicates a damaged file and would end as a failed allocation.
constexpr std::pair<const char*, int64_t> kMaxSizes[] = {
    {"vocab_size", int64_t{1} << 24},
    {"hidden_size", int64_t{1} << 17},
    {"n_embd", int64_t{1} << 17},
    {"intermediate_size", int64_t{1} << 20},
    {"n_inner", int64_t{1} << 20},
    {"num_hidden_layers", 1 << 12},
    {"n_layer", 1 << 12},
    {"num_attention_heads", 1 << 14},
    {"num_key_value_heads", 1 << 14},
    {"n_head", 1 << 14},
    {"head_dim", 1 << 13},
    {"max_position_embeddings", int64_t{1} << 27},
    {"n_positions", int64_t{1} << 27},
    {"type_vocab_size", int64_t{1} << 16},
};

int64_t size(const JsonObject& json, const std::string& key,
             std::optional<int64_t> fallback = std::nullopt) {
  const auto* limit = std::find_if(std::begin(kMaxSizes), std::end(kMaxSizes),
                                   [&](const auto& entry) { return entry.first == key; });
  return json.integer(key, 1, limit == std::end(kMaxSizes) ? kMaxSize : limit->second, fallback);
}

void check_activation(const JsonObject& json, const std::string& key, const std::string& usual,
                      const std::string& same) {
  const std::string name = json.text(key, usual);
  if (name != usual && name != same) {
    json.refuse(key, json.shown(key) + ": only \"" + usual + "\" is supported");
  }
}

void refuse_if(const JsonObject& json, const std::string& key, bool condition,
               const std::string& why) {
  if (condition) {
    json.refuse(key, json.shown(key) + ": " + why);
  }
}

// If rope_scaling and rope_parameters are both given, transformers 5 uses rope_scaling.
std::optional<JsonObject> rope_object(const JsonObject& json) {
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (json.has(key)) {
      auto rope = json.object(key);
      if (!rope.json().empty()) {
        return rope;
      }
    }
  }
  return std::nullopt;
}

void read_llama3(const JsonObject& json, const JsonObject& rope, int64_t max_positions,
                 ddp::ops::RotaryOptions& options) {
  options.scaling = "llama3";
  options.factor = rope.number("factor", 1, kMaxNumber);
  options.low_freq_factor = rope.number("low_freq_factor", 1e-9, kMaxNumber);
  options.high_freq_factor = rope.number("high_freq_factor", 1e-9, kMaxNumber);
  if (options.high_freq_factor <= options.low_freq_factor) {
    rope.fail("high_freq_factor",
              concat(rope.shown("high_freq_factor"), ", expected more than low_freq_factor (",
                     options.low_freq_factor, ")"));
  }
  const char* key = "original_max_position_embeddings";
  options.original_max_positions = json.has(key) ? size(json, key) : size(rope, key, max_positions);
}

void read_rope(const JsonObject& json, Qwen2Options& options) {
  auto& scaling = options.rope_scaling;
  scaling = {};
  const auto rope = rope_object(json);
  const JsonObject& theta_at = rope && rope->has("rope_theta") ? *rope : json;
  options.rope_theta = theta_at.number("rope_theta", 1, kMaxNumber, 10000.0);
  const JsonObject& part_at = rope && rope->has("partial_rotary_factor") ? *rope : json;
  if (part_at.number("partial_rotary_factor", 0, 1, 1.0) != 1) {
    part_at.refuse("partial_rotary_factor", part_at.shown("partial_rotary_factor") +
                                                ": rotary embeddings of only a part of each "
                                                "head are not supported");
  }
  if (rope) {
    const std::string key = rope->has("rope_type") || !rope->has("type") ? "rope_type" : "type";
    const bool nested = std::any_of(rope->json().begin(), rope->json().end(),
                                    [](const auto& value) { return value.is_object(); });
    if (nested) {
      json.refuse("rope_parameters", "differs between kinds of layers, which is not supported");
    }
    const std::string type = rope->text(key, "default");
    if (type == "linear") {
      scaling.scaling = "linear";
      scaling.factor = rope->number("factor", 1, kMaxNumber);
    } else if (type == "llama3") {
      read_llama3(json, *rope, options.max_positions, scaling);
    } else if (type != "default") {
      rope->refuse(key, rope->shown(key) +
                            ": only \"default\", \"linear\" and \"llama3\" rotary "
                            "positions are supported");
    }
  }
  scaling.head_dim = options.head_dim;
  scaling.theta = options.rope_theta;
}

// Accepts a window that no position exceeds: it has no effect.
void refuse_window(const JsonObject& json, int64_t window, int64_t max_positions) {
  if (window < max_positions) {
    json.refuse("sliding_window",
                concat("is in use (", window, " of ", max_positions,
                       " positions), which is not supported; texts of at most ", window,
                       " tokens need none: set max_position_embeddings to ", window,
                       " in a copy of the file"));
  }
}

void check_window(const JsonObject& json, const Qwen2Options& options, const std::string& type) {
  if (type == "mistral") {
    // transformers reads an absent key as 4096 and null as no window.
    const bool none = json.mentions("sliding_window") && !json.has("sliding_window");
    if (!none) {
      refuse_window(json, size(json, "sliding_window", 4096), options.max_positions);
    }
  } else if (type == "qwen2" && json.boolean("use_sliding_window", false) &&
             !(json.mentions("sliding_window") && !json.has("sliding_window"))) {
    bool in_use = json.integer("max_window_layers", 0, kMaxSize, 28) < options.num_layers;
    if (json.has("layer_types")) {
      const auto& layers = json.json().at("layer_types");
      in_use = std::any_of(layers.begin(), layers.end(),
                           [](const auto& layer) { return layer != "full_attention"; });
    }
    if (in_use) {
      refuse_window(json, size(json, "sliding_window", 4096), options.max_positions);
    }
  }
}

void read_heads(const JsonObject& json, const std::string& type, Qwen2Options& options) {
  options.num_heads = size(json, "num_attention_heads");
  // Llama's first configs have no num_key_value_heads; the other types require it.
  const bool may_lack = type == "llama" || json.mentions("num_key_value_heads");
  options.num_kv_heads = may_lack ? size(json, "num_key_value_heads", options.num_heads)
                                  : size(json, "num_key_value_heads");
  if (options.num_heads % options.num_kv_heads != 0) {
    json.fail("num_key_value_heads",
              concat(json.shown("num_key_value_heads"),
                     ", expected a divisor of num_attention_heads (", options.num_heads, ")"));
  }
  if (!json.has("head_dim") && options.hidden_size % options.num_heads != 0) {
    json.fail("hidden_size",
              concat(json.shown("hidden_size"), ", expected a multiple of num_attention_heads (",
                     options.num_heads, ") as there is no head_dim"));
  }
  options.head_dim =
      size(json, "head_dim", std::max<int64_t>(1, options.hidden_size / options.num_heads));
  if (options.head_dim % 2 != 0) {
    json.fail(json.has("head_dim") ? "head_dim" : "hidden_size",
              concat("gives heads of ", options.head_dim, ", expected an even number"));
  }
}

Qwen2Options read_qwen2(const JsonObject& json, const std::string& type) {
  Qwen2Options options;
  options.vocab_size = size(json, "vocab_size");
  options.hidden_size = size(json, "hidden_size");
  options.intermediate_size = size(json, "intermediate_size");
  options.num_layers = size(json, "num_hidden_layers");
  options.max_positions = size(json, "max_position_embeddings");
  read_heads(json, type, options);
  options.rms_norm_eps = json.number("rms_norm_eps", 0, 1, 1e-6);
  options.initializer_range = json.number("initializer_range", 0, 1000, 0.02);
  options.tie_word_embeddings = json.boolean("tie_word_embeddings", false);
  options.qkv_bias = type == "qwen2" || (type == "llama" && json.boolean("attention_bias", false));
  options.o_bias = type == "llama" && options.qkv_bias;
  options.mlp_bias = type == "llama" && json.boolean("mlp_bias", false);
  check_activation(json, "hidden_act", "silu", "swish");
  refuse_if(json, "attention_dropout", json.number("attention_dropout", 0, 1, 0.0) != 0,
            "dropout of attention weights is not supported in this model");
  read_rope(json, options);
  check_window(json, options, type);
  return options;
}

Gpt2Options read_gpt2(const JsonObject& json) {
  Gpt2Options options;
  options.vocab_size = size(json, "vocab_size");
  options.max_positions = size(json, "n_positions");
  options.hidden_size = size(json, "n_embd");
  options.num_layers = size(json, "n_layer");
  options.num_heads = size(json, "n_head");
  options.intermediate_size = json.has("n_inner") ? size(json, "n_inner") : 0;
  if (options.hidden_size % options.num_heads != 0) {
    json.fail("n_embd", concat(json.shown("n_embd"), ", expected a multiple of n_head (",
                               options.num_heads, ")"));
  }
  options.layer_norm_eps = json.number("layer_norm_epsilon", 0, 1, 1e-5);
  options.initializer_range = json.number("initializer_range", 0, 1000, 0.02);
  check_activation(json, "activation_function", "gelu_new", "gelu_pytorch_tanh");
  options.dropout = json.number("resid_pdrop", 0, 1, 0.1);
  for (const char* key : {"embd_pdrop", "attn_pdrop"}) {
    refuse_if(json, key, json.number(key, 0, 1, 0.1) != options.dropout,
              concat("differs from resid_pdrop (", options.dropout,
                     "); only one dropout for all is supported"));
  }
  refuse_if(json, "tie_word_embeddings", !json.boolean("tie_word_embeddings", true),
            "only a GPT-2 with tied embeddings is supported");
  refuse_if(json, "scale_attn_weights", !json.boolean("scale_attn_weights", true),
            "only scaled attention is supported");
  for (const char* key : {"scale_attn_by_inverse_layer_idx", "add_cross_attention"}) {
    refuse_if(json, key, json.boolean(key, false), "this is not supported");
  }
  return options;
}

BertOptions read_bert(const JsonObject& json) {
  BertOptions options;
  options.vocab_size = size(json, "vocab_size");
  options.max_positions = size(json, "max_position_embeddings");
  options.num_token_types = size(json, "type_vocab_size", 2);
  options.hidden_size = size(json, "hidden_size");
  options.num_layers = size(json, "num_hidden_layers");
  options.num_heads = size(json, "num_attention_heads");
  options.intermediate_size = size(json, "intermediate_size");
  if (options.hidden_size % options.num_heads != 0) {
    json.fail("hidden_size",
              concat(json.shown("hidden_size"), ", expected a multiple of num_attention_heads (",
                     options.num_heads, ")"));
  }
  options.hidden_dropout = json.number("hidden_dropout_prob", 0, 0.999, 0.1);
  options.attention_dropout = json.number("attention_probs_dropout_prob", 0, 0.999, 0.1);
  options.layer_norm_eps = json.number("layer_norm_eps", 0, 1, 1e-12);
  options.initializer_range = json.number("initializer_range", 0, 1000, 0.02);
  const bool no_pad = json.mentions("pad_token_id") && !json.has("pad_token_id");
  options.pad_token_id = no_pad ? -1 : json.integer("pad_token_id", 0, options.vocab_size - 1, 0);
  check_activation(json, "hidden_act", "gelu", "gelu");
  const std::string positions = json.text("position_embedding_type", "absolute");
  refuse_if(json, "position_embedding_type", positions != "absolute",
            "only \"absolute\" positions are supported");
  refuse_if(json, "tie_word_embeddings", !json.boolean("tie_word_embeddings", true),
            "only a BERT with tied embeddings is supported");
  for (const char* key : {"is_decoder", "add_cross_attention"}) {
    refuse_if(json, key, json.boolean(key, false), "this is not supported");
  }
  return options;
}

std::optional<at::ScalarType> read_dtype(const JsonObject& json) {
  const std::string key = json.has("dtype") ? "dtype" : "torch_dtype";
  const std::string name = json.text(key, "");
  for (const auto& [word, dtype] :
       {std::pair{"float32", at::kFloat}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf}}) {
    if (name == word) {
      return dtype;
    }
  }
  if (!name.empty() && name != "auto") {
    json.refuse(key, json.shown(key) + ": only float32, bfloat16 and float16 are supported");
  }
  return std::nullopt;
}

void read_tokens(const JsonObject& json, HfConfig& config) {
  const auto token = [&json](const nlohmann::json& value, const std::string& key) {
    if (!value.is_number_integer() || value.get<int64_t>() < 0) {
      json.fail(key, json.shown(key) + ", expected token ids");
    }
    return value.get<int64_t>();
  };
  if (json.has("bos_token_id")) {
    config.bos_token_id = token(json.json().at("bos_token_id"), "bos_token_id");
  }
  if (json.has("eos_token_id")) {
    const auto& ends = json.json().at("eos_token_id");
    for (const auto& value : ends.is_array() ? ends : nlohmann::json::array({ends})) {
      config.eos_token_ids.push_back(token(value, "eos_token_id"));
    }
  }
}

std::string config_path(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_directory(path, ignored) ? path + "/config.json" : path;
}

template <typename Options>
Options read_kind(const std::string& path, const char* wanted) {
  const HfConfig config = read_hf_config(path);
  if (const auto* options = std::get_if<Options>(&config.options)) {
    return *options;
  }
  throw ddp::SettingsError(config_path(path) + ": key \"model_type\" is \"" + config.model_type +
                           "\", but " + wanted + " is needed here");
}

}  // namespace

HfConfig read_hf_config(const std::string& path) {
  const JsonObject json(config_path(path));
  HfConfig config;
  config.model_type = json.text("model_type");
  const std::string& type = config.model_type;
  if (type != "qwen2" && type != "llama" && type != "mistral" && type != "gpt2" && type != "bert") {
    json.refuse("model_type", json.shown("model_type") + ": " + kSupported);
  }
  if (json.has("quantization_config")) {
    json.refuse("quantization_config", "is set: quantized weights are not supported");
  }
  if (type == "gpt2") {
    config.options = read_gpt2(json);
  } else if (type == "bert") {
    config.options = read_bert(json);
  } else {
    config.options = read_qwen2(json, type);
  }
  config.dtype = read_dtype(json);
  read_tokens(json, config);
  return config;
}

Qwen2Options read_qwen2_config(const std::string& path) {
  return read_kind<Qwen2Options>(path, "a model of the Qwen2 or Llama family");
}

Gpt2Options read_gpt2_config(const std::string& path) {
  return read_kind<Gpt2Options>(path, "gpt2");
}

BertOptions read_bert_config(const std::string& path) {
  return read_kind<BertOptions>(path, "bert");
}

}  // namespace models
