// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>

#include "models/pretrained/hf_weights.hpp"
#include "pretrained/new_folder.hpp"

namespace models::detail {

/// Fills `target` as save_pretrained() does, and commits it.
void save_model(const torch::nn::Module& module, const HfConfig& config, NewFolder& target,
                const PretrainedSaveOptions& options);

}  // namespace models::detail
