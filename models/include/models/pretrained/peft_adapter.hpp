// SPDX-License-Identifier: Apache-2.0
// LoRA adapters in PEFT's files: a folder with adapter_config.json and adapter_model.safetensors,
// whose keys are "base_model.model.<layer>.lora_A.weight" and "….lora_B.weight".
#pragma once

#include <torch/nn/module.h>

#include <string>

#include "models/lora.hpp"
#include "models/pretrained/hf_weights.hpp"

namespace models {

/// Description of the adapter in a folder.
struct PeftAdapter {
  LoraOptions lora;        ///< target_modules: the full name of every layer that has an adapter
  std::string base_model;  ///< as the file names it; empty: not given
  /// The base_identity that save_adapter() was given; empty in PEFT's own files.
  std::string base_identity;
};

/// Reads adapter_config.json and the names in adapter_model.safetensors. Throws ddp::ReadError
/// naming file and key if one is missing, broken, or the two contradict each other. Throws
/// ddp::SettingsError naming an unsupported key: another peft_type than LORA, bias other than
/// "none", use_dora, use_rslora, modules_to_save, rank_pattern, alpha_pattern, fan_in_fan_out,
/// initialisations that change the base (pissa, olora, …), and any unknown key of PEFT that is set.
PeftAdapter read_adapter(const std::string& folder);

/// Identifies the weights of a base: dtype and fingerprint of all parameters except adapters'.
std::string base_identity(const torch::nn::Module& module);
/// The same with the weights cast to `dtype`, as training in that dtype has them.
std::string base_identity(const torch::nn::Module& module, torch::Dtype dtype);
/// The same from a known fingerprint: ddp::DataParallelModel::frozen_fingerprint().
std::string base_identity(torch::Dtype dtype, const std::string& fingerprint);

/// Checks that `folder` was trained over the base `identity`; its shapes alone would fit every base
/// of that size. Throws ddp::MismatchError if `folder` names another base. Warns if that base had
/// another dtype, because then the weights cannot be compared. PEFT's own adapters name none.
void require_base(const std::string& folder, const std::string& identity);

/// Calls add_lora with the settings in `folder` (rank, alpha, dropout, layers), then loads A and B
/// in `dtype`. Throws as read_adapter, and ddp::MismatchError listing the layers that are missing
/// or of another size (an adapter of another base). An error leaves the module unchanged.
LoraSummary add_adapter(torch::nn::Module& module, const std::string& folder,
                        torch::Dtype dtype = torch::kFloat32);

/// Loads `folder` into the adapters of `module`, cast to their dtype. Throws as read_adapter, and
/// ddp::MismatchError if rank, alpha, the set of layers or a layer's size differ. An error leaves
/// the module unchanged. Dropout may differ: it is a training setting.
void load_adapter(torch::nn::Module& module, const std::string& folder);

/// Throws ddp::SettingsError if the adapter in `folder` differs from the module's in rank, alpha or
/// set of layers. save_adapter() would refuse such a folder.
void require_adapter_fits(const torch::nn::Module& module, const std::string& folder);

/// Writes the adapters of `module` into `folder` for PEFT. Call it on one rank. Each file is
/// replaced atomically, and a new folder appears with both files. `base_model` is the path or name
/// of the base that PEFT should load, or empty. `base_identity` identifies the base's weights; it
/// goes into the metadata of adapter_model.safetensors, which PEFT ignores. Throws
/// ddp::SettingsError if `folder` holds an adapter of another rank, alpha or set of layers. Warns
/// of other parameters that require a gradient, which PEFT's files do not hold. Throws
/// std::invalid_argument if the module has no adapter or its layers differ in rank or alpha. Throws
/// ddp::WriteError.
void save_adapter(const torch::nn::Module& module, const std::string& folder,
                  const std::string& base_model = "", const std::string& base_identity = "");

/// Saves the full model `base` + `adapter` as a new folder `output` that transformers loads. The
/// folder holds merged weights, config.json, and the base's tokenizer files. Weights are summed in
/// float32 and rounded once, to the dtype of most of the base's bytes or of `options`. The base may
/// be stored in another dtype than the adapter was trained over. All or nothing. Throws as
/// load_pretrained, require_base, add_adapter and save_pretrained do.
void merge_adapter(const std::string& base, const std::string& adapter, const std::string& output,
                   const PretrainedSaveOptions& options = {});

}  // namespace models
