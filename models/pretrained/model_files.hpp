// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "models/pretrained/hf_config.hpp"
#include "models/pretrained/hf_weights.hpp"

namespace models::detail {

/// True if read_model_files() reads files of this name.
bool is_model_file(const std::string& name);

/// Returns the config.json to save, for weights of `dtype`. Prefers the one in `files`, so that
/// keys unknown here survive, over `config`.
std::string saved_config(const ModelFiles& files, HfConfig config, at::ScalarType dtype);

}  // namespace models::detail
