// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>

#include <string>

#include "models/pretrained/hf_weights.hpp"

namespace models::detail {

/// Writes the weights of `module` into `folder`: model.safetensors, or shards and their index.
void save_shards(const torch::nn::Module& module, const std::string& folder,
                 const PretrainedSaveOptions& options);

/// The dtype that most of the module's values have.
at::ScalarType main_dtype(const torch::nn::Module& module);

}  // namespace models::detail
