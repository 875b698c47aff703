// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

namespace models {

/// Casts all floating-point parameters and buffers to `dtype` (bfloat16 or float16), except those
/// of normalisation layers, which stay float32. An optimizer with float32 masters updates these
/// leaves, so no forward casts a weight and no autocast is needed. Strides are kept. Call it before
/// wrapping the module.
///
/// Normalisation layers are those of torch::nn (Batch, Group, Layer, Instance) and those that a
/// ddp::ops::NormOwner names.
void to_half_but_norms(torch::nn::Module& module, c10::ScalarType dtype);

/// Casts a model's input to the dtype of its weights if that has 16 bits.
torch::Tensor as_weights(const torch::Tensor& input, const torch::Tensor& weight);

}  // namespace models
