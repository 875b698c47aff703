// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

namespace models {

/// Gives all floating-point parameters and buffers `dtype` (bfloat16 or float16), but those of
/// normalisation layers, which stay as they are (float32): the leaves that an optimizer with
/// float32 masters updates, so that no forward casts a weight. Strides stay. Before wrapping the
/// module.
///
/// Normalisation layers are those of torch::nn (Batch, Group, Layer, Instance) and those that a
/// ddp::ops::NormOwner names. No autocast is needed around such a model.
void to_half_but_norms(torch::nn::Module& module, c10::ScalarType dtype);

}  // namespace models
