// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>

namespace models {

/// Gives every 4-dimensional parameter and buffer channels_last strides, like Python's
/// `module.to(memory_format=torch.channels_last)`. Values are unchanged. Call it before wrapping
/// the module: gradients take their parameter's strides.
void to_channels_last(torch::nn::Module& module);

}  // namespace models
