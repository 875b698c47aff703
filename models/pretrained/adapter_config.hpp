// SPDX-License-Identifier: Apache-2.0
// adapter_config.json, without the weights.
#pragma once

#include <string>
#include <vector>

#include "models/lora.hpp"

namespace models::detail {

inline constexpr const char* kAdapterConfig = "adapter_config.json";
inline constexpr const char* kAdapterWeights = "adapter_model.safetensors";

struct AdapterConfig {
  LoraOptions lora;  ///< target_modules: PEFT's list; empty where it is a pattern
  std::string base_model;
  bool lists_modules = true;  ///< false: target_modules is a regular expression or "all-linear"
  std::vector<std::string> exclude_modules;  ///< PEFT's list of layers without adapters
  bool lists_excluded = true;                ///< false: exclude_modules is a regular expression
  bool is_causal_lm = true;                  ///< false: PEFT's task_type is not known
};

/// See read_adapter().
AdapterConfig read_adapter_config(const std::string& path);

/// Text that PEFT's from_pretrained can read.
std::string adapter_config_json(const AdapterConfig& config);

/// PEFT's rule: `target_module` is the full name or its last parts.
bool names_layer(const std::string& target_module, const std::string& layer);

}  // namespace models::detail
