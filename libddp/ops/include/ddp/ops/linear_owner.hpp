// SPDX-License-Identifier: Apache-2.0
// Linear layers that are no modules of their own, such as those of an exported program, and
// low-rank adapters (Hu et al., arXiv:2106.09685) on them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace ddp::ops {

/// y = x weightᵀ + bias, and with an adapter + lora_alpha / rank * (dropout(x) lora_aᵀ) lora_bᵀ.
struct LinearLayer {
  std::string name;            ///< "model.layers.0.self_attn.q_proj"
  at::Tensor weight;           ///< [out, in]
  at::Tensor lora_a{};         ///< [rank, in]; undefined without an adapter
  at::Tensor lora_b{};         ///< [out, rank]
  double lora_alpha = 0;       ///< the adapter's output is scaled by lora_alpha / rank
  double lora_dropout = 0;     ///< of the adapter's input, in training
  bool shares_weight = false;  ///< other operators read the weight too: a tied embedding
};

/// Modules whose linear layers are no models::Linear derive from it so that models::add_lora and
/// PEFT's files find these layers.
class LinearOwner {
 public:
  virtual ~LinearOwner() = default;
  virtual std::vector<LinearLayer> linears() const = 0;  ///< in the order of parameters()
  /// Registers each layer's lora_a and lora_b as "<name>.lora_A.weight" and "<name>.lora_B.weight".
  /// From then on they take part in forward. Reads name, lora_a, lora_b, lora_alpha and
  /// lora_dropout.
  virtual void add_adapters(const std::vector<LinearLayer>& layers) = 0;
  virtual void remove_adapters() = 0;  ///< of all layers; the weights stay as they are
};

}  // namespace ddp::ops
