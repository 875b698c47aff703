// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/pretrained/hf_weights.hpp"
#include "models/qwen2.hpp"

namespace examples {

/// Where a model began.
struct TrainedFrom {
  std::string base_path = "";            ///< model.path; empty: random weights
  std::string base_identity = "";        ///< of models::save_adapter()
  std::string tokens_path = "";          ///< folder of the token files
  std::vector<int64_t> end_tokens = {};  ///< of these
};

/// What a whole model needs beside its weights, so that others can use it.
struct TrainedFiles {
  models::ModelFiles files;              ///< of the base, else the tokenizer's of the token files
  std::vector<int64_t> end_tokens = {};  ///< where the base does not say
};

/// Empty where `module` has adapters: they name their base. Throws ddp::ReadError.
TrainedFiles read_trained_files(const models::Qwen2Impl& module, const TrainedFrom& from);

/// Writes what a run trained into `folder`: adapters in PEFT's layout where `module` has them
/// (`from` is noted as their base), else the whole model in Hugging Face's. What an earlier
/// call wrote there is replaced when the new files are complete; files of others stay. On one rank.
/// Throws ddp::WriteError.
void save_trained(const models::Qwen2Impl& module, const std::string& folder,
                  const TrainedFrom& from, const TrainedFiles& beside);

/// Throws what save_trained() would say after hours of training: ddp::WriteError where `folder`
/// cannot be made or written to, ddp::SettingsError where it holds another adapter, is no folder,
/// or is `base_path` itself. Messages begin with `setting`. Leaves `folder` as it is.
void require_writable(const models::Qwen2Impl& module, const std::string& folder,
                      const std::string& base_path, const std::string& setting);

}  // namespace examples
