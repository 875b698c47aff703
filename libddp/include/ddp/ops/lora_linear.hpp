// SPDX-License-Identifier: Apache-2.0
// A frozen linear layer with a trained low-rank addition (Hu et al., arXiv:2106.09685).
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::ops {

struct LoraLinearOptions {
  double scale = 1;      ///< alpha / rank
  double dropout_p = 0;  ///< of the low-rank branch's input; 0 outside of training
};

/// x Wᵀ + bias + scale * (dropout(x) Aᵀ) Bᵀ. The product B A is never formed.
///
///   input [..., in], weight [out, in], bias [out] or undefined, lora_a [rank, in], lora_b [out,
///   rank]
///
/// Computes in input's dtype, which is weight's; A and B may be float32 beside it (their gradients
/// are then float32). Keeps `input`, which the layers of one input share, and one byte an element
/// where it drops out. `weight` and `bias` get no gradient.
at::Tensor lora_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                       const at::Tensor& lora_a, const at::Tensor& lora_b,
                       const LoraLinearOptions& options);

}  // namespace ddp::ops
