// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "models/pretrained/hf_config.hpp"
#include "models/pretrained/hf_weights.hpp"

namespace models::detail {

/// Whether read_model_files() reads files of this name.
bool is_model_file(const std::string& name);

/// The config.json to save: that of `files` where there is one, so that keys unknown here survive,
/// else `config`; for weights of `dtype`.
std::string saved_config(const ModelFiles& files, HfConfig config, at::ScalarType dtype);

}  // namespace models::detail
