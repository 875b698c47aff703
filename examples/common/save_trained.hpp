// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/pretrained/hf_weights.hpp"
#include "models/qwen2.hpp"

namespace examples {

/// Origin of a model.
struct TrainedFrom {
  std::string base_path = "";            ///< model.path; empty: random weights
  std::string base_identity = "";        ///< argument of models::save_adapter()
  std::string tokens_path = "";          ///< folder of the token files
  std::vector<int64_t> end_tokens = {};  ///< of the token files
};

/// Files and tokens that a saved whole model needs in addition to its weights.
struct TrainedFiles {
  models::ModelFiles files;  ///< the base's, else the tokenizer files of the token files
  std::vector<int64_t> end_tokens = {};  ///< used if the base names none
};

/// Returns nothing if `module` has adapters, because they name their base. Throws ddp::ReadError.
TrainedFiles read_trained_files(const models::Qwen2Impl& module, const TrainedFrom& from);

/// Writes a trained model into `folder`: the adapters in PEFT's layout if `module` has them (with
/// `from` as their base), else the whole model in Hugging Face's. Files of an earlier call are
/// replaced when the new ones are complete; other files stay. Call it on one rank. Throws
/// ddp::WriteError.
void save_trained(const models::Qwen2Impl& module, const std::string& folder,
                  const TrainedFrom& from, const TrainedFiles& beside);

/// Throws the errors of save_trained() before training. Throws ddp::WriteError if `folder` cannot
/// be created or written to. Throws ddp::SettingsError if `folder` holds another adapter, is not a
/// folder, or is `base_path` itself. Messages begin with `setting`. Leaves `folder` unchanged.
void require_writable(const models::Qwen2Impl& module, const std::string& folder,
                      const std::string& base_path, const std::string& setting);

}  // namespace examples
