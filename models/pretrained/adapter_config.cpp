// SPDX-License-Identifier: Apache-2.0
#include "pretrained/adapter_config.hpp"

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "pretrained/json_file.hpp"

namespace models::detail {
namespace {

using Json = nlohmann::json;

// Keys that are read here, and keys that do not affect the function of an adapter.
const std::set<std::string>& known_keys() {
  static const std::set<std::string> keys{
      "peft_type",         "r",
      "lora_alpha",        "lora_dropout",
      "target_modules",    "bias",
      "init_lora_weights", "base_model_name_or_path",
      "auto_mapping",      "revision",
      "inference_mode",    "task_type",
      "peft_version",      "megatron_core",
      "qalora_group_size", "exclude_modules",
      "layers_pattern",    "layers_to_transform",
      "loftq_config",      "eva_config",
      "corda_config",      "lora_ga_config",
      "runtime_config",    "ensure_weight_tying",
  };
  return keys;
}

bool is_unset(const Json& value) {
  return value.is_null() || value == false || value == "" || value == 0 ||
         (value.is_structured() && value.empty());
}

void refuse_unsupported(const JsonObject& json) {
  if (json.text("peft_type") != "LORA") {
    json.refuse("peft_type", json.shown("peft_type") + ": only \"LORA\" is supported");
  }
  if (json.text("bias", "none") != "none") {
    json.refuse("bias", json.shown("bias") + ": only \"none\" is supported");
  }
  for (const auto& [key, value] : json.json().items()) {
    if (known_keys().count(key) == 0 && !is_unset(value)) {
      json.refuse(key, json.shown(key) + ": this is not supported");
    }
  }
  if (json.has("init_lora_weights")) {
    // Other initialisations (pissa, olora, corda, loftq, …) move a part of the base into the
    // adapter.
    const auto& value = json.json().at("init_lora_weights");
    if (!value.is_boolean() && value != "gaussian" && value != "orthogonal" && value != "eva") {
      json.refuse("init_lora_weights", json.shown("init_lora_weights") +
                                           ": initialisations that change the base are not "
                                           "supported");
    }
  }
}

// PEFT's names of layers: a list, or a text, which is a regular expression or "all-linear".
// Returns whether it is a list.
bool read_modules(const JsonObject& json, const std::string& key,
                  std::vector<std::string>& modules) {
  const auto& value = json.json().at(key);
  if (value.is_string()) {
    return false;
  }
  bool all_names = value.is_array();
  for (const auto& name : value) {
    all_names = all_names && name.is_string();
  }
  if (!all_names) {
    json.fail(key, json.shown(key) + ", expected a list of names");
  }
  modules = value.get<std::vector<std::string>>();
  return true;
}

void read_targets(const JsonObject& json, AdapterConfig& config) {
  config.lora.target_modules.clear();
  if (!json.has("target_modules")) {
    json.fail("target_modules", "is missing");
  }
  config.lists_modules = read_modules(json, "target_modules", config.lora.target_modules);
  if (json.has("exclude_modules")) {
    config.lists_excluded = read_modules(json, "exclude_modules", config.exclude_modules);
  }
}

}  // namespace

AdapterConfig read_adapter_config(const std::string& path) {
  const JsonObject json(path);
  refuse_unsupported(json);
  AdapterConfig config;
  config.lora.rank = json.integer("r", 1, int64_t{1} << 31);
  config.lora.alpha = json.number("lora_alpha", 0, 1e30);
  config.lora.dropout = json.number("lora_dropout", 0, 0.999999, 0.0);
  config.base_model = json.text("base_model_name_or_path", "");
  read_targets(json, config);
  return config;
}

std::string adapter_config_json(const AdapterConfig& config) {
  nlohmann::ordered_json json;
  json["peft_type"] = "LORA";
  json["task_type"] = nullptr;
  if (config.is_causal_lm) {
    json["task_type"] = "CAUSAL_LM";
  }
  json["base_model_name_or_path"] = nullptr;
  if (!config.base_model.empty()) {
    json["base_model_name_or_path"] = config.base_model;
  }
  json["revision"] = nullptr;
  json["inference_mode"] = true;
  json["r"] = config.lora.rank;
  const double alpha = config.lora.alpha;
  if (alpha == std::floor(alpha) && alpha < 1e15) {
    json["lora_alpha"] = static_cast<int64_t>(alpha);
  } else {
    json["lora_alpha"] = alpha;
  }
  json["lora_dropout"] = config.lora.dropout;
  json["target_modules"] = config.lora.target_modules;
  json["bias"] = "none";
  json["fan_in_fan_out"] = false;
  json["init_lora_weights"] = true;
  json["use_dora"] = false;
  json["use_rslora"] = false;
  json["modules_to_save"] = nullptr;
  json["rank_pattern"] = nlohmann::ordered_json::object();
  json["alpha_pattern"] = nlohmann::ordered_json::object();
  return json.dump(2) + "\n";
}

bool names_layer(const std::string& target_module, const std::string& layer) {
  return layer == target_module || layer.ends_with("." + target_module);
}

}  // namespace models::detail
