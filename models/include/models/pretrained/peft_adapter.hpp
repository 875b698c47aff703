// SPDX-License-Identifier: Apache-2.0
// LoRA adapters in PEFT's files: a folder with adapter_config.json and adapter_model.safetensors,
// whose keys are "base_model.model.<layer>.lora_A.weight" and "….lora_B.weight".
#pragma once

#include <torch/nn/module.h>

#include <string>

#include "models/lora.hpp"
#include "models/pretrained/hf_weights.hpp"

namespace models {

/// What a folder says of its adapter.
struct PeftAdapter {
  LoraOptions lora;        ///< target_modules: the full name of every layer that has an adapter
  std::string base_model;  ///< as the file names it; empty: not said
  /// What save_adapter() was told of the base's weights; empty: nothing, as in PEFT's own files.
  std::string base_identity;
};

/// Reads adapter_config.json and the names in adapter_model.safetensors. Throws ddp::ReadError
/// naming file and key where one is missing, broken, or the two contradict each other;
/// ddp::SettingsError for what is not supported, by its name: another peft_type than LORA, bias
/// other than "none", use_dora, use_rslora, modules_to_save, rank_pattern, alpha_pattern,
/// fan_in_fan_out, initialisations that change the base (pissa, olora, …), and any other key of
/// PEFT that is set and unknown here.
PeftAdapter read_adapter(const std::string& folder);

/// Tells the weights of a base from others: dtype and fingerprint of all parameters but adapters'.
std::string base_identity(const torch::nn::Module& module);
/// The same of a fingerprint that is known: ddp::DataParallelModel::frozen_identity().
std::string base_identity(torch::Dtype dtype, const std::string& fingerprint);

/// An adapter's shapes fit every base of its size, its numbers only the one it was trained over.
/// Throws ddp::MismatchError where `folder` names another base than `identity`, and warns where
/// that one was of another dtype, so that it cannot be told. PEFT's own adapters name none.
void require_base(const std::string& folder, const std::string& identity);

/// add_lora as the adapter in `folder` says (its rank, alpha, dropout, layers), then loads it; A
/// and B are of `dtype`. Throws as read_adapter, and ddp::MismatchError listing the layers that the
/// module lacks or that are of another size (an adapter of another base); then nothing was changed.
LoraSummary add_adapter(torch::nn::Module& module, const std::string& folder,
                        torch::Dtype dtype = torch::kFloat32);

/// Loads `folder` into the adapters that `module` has from add_lora, cast to their dtype. Throws as
/// read_adapter, and ddp::MismatchError where rank, alpha, the set of layers or a layer's size are
/// others; then nothing was changed. Dropout may differ: it is a setting of training.
void load_adapter(torch::nn::Module& module, const std::string& folder);

/// Throws ddp::SettingsError where `folder` holds an adapter of another rank, alpha or set of
/// layers than the module's: save_adapter() would refuse it.
void require_adapter_fits(const torch::nn::Module& module, const std::string& folder);

/// Writes the adapters of `module` into `folder` so that PEFT loads them. On one rank. Each file is
/// replaced atomically, and a folder made here appears with both. `base_model` is what PEFT should
/// load below them (a path or name, or empty), `base_identity` a text that tells
/// its weights from others; it goes into the metadata of adapter_model.safetensors, which PEFT
/// leaves unread. Throws ddp::SettingsError where `folder` holds an adapter of another rank, alpha
/// or set of layers, std::invalid_argument where the module has no adapter or layers of different
/// rank or alpha, ddp::WriteError.
void save_adapter(const torch::nn::Module& module, const std::string& folder,
                  const std::string& base_model = "", const std::string& base_identity = "");

/// The full model `base` + `adapter` as a new folder `output` that transformers loads: merged
/// weights (dtype as in the base, unless `options` say another; the sum is made in float32),
/// config.json, and the base's tokenizer files. All or nothing. Throws as load_pretrained,
/// require_base, add_adapter and save_pretrained do.
void merge_adapter(const std::string& base, const std::string& adapter, const std::string& output,
                   const PretrainedSaveOptions& options = {});

}  // namespace models
