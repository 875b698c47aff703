// SPDX-License-Identifier: Apache-2.0
// A frozen linear layer plus a trained low-rank update (Hu et al., arXiv:2106.09685).
#pragma once

#include <ATen/core/Tensor.h>

namespace ddp::ops {

struct LoraLinearOptions {
  double scale = 1;      ///< alpha / rank
  double dropout_p = 0;  ///< of the low-rank branch's input; 0 outside training
};

/// x Wᵀ + bias + scale * (dropout(x) Aᵀ) Bᵀ. The product B A is never formed.
///
///   input [..., in], weight [out, in], bias [out] or undefined, lora_a [rank, in], lora_b [out,
///   rank]
///
/// Computes in the common dtype of input and weight. A and B may be float32 (then also their
/// gradients). Saves `input`, which layers of one input share, and with dropout one byte per
/// element. `weight` and `bias` get no gradient.
at::Tensor lora_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                       const at::Tensor& lora_a, const at::Tensor& lora_b,
                       const LoraLinearOptions& options);

}  // namespace ddp::ops
