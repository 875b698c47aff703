// SPDX-License-Identifier: Apache-2.0
// Pieces that decoders share; not installed.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <memory>
#include <string>

#include "models/causal_lm.hpp"

namespace models::detail {

/// A module that only gives its children a common name.
class Group : public torch::nn::Module {
 public:
  using torch::nn::Module::register_module;
  using torch::nn::Module::register_parameter;
};

/// A parameter `name` of uninitialised memory.
torch::Tensor new_parameter(torch::nn::Module& owner, const std::string& name,
                            torch::IntArrayRef shape, const torch::TensorOptions& options);

/// Attention over a batch [batch, seq, heads, head_dim], packed or not, with a cache or without;
/// -> [batch, seq, heads * head_dim]. `layer` is the cache's.
struct AttentionCall {
  const TokenInput& input;
  KeyValueCache* cache = nullptr;
  std::size_t layer = 0;
  ddp::ops::AttentionOptions options{};
};
torch::Tensor attend(const torch::Tensor& query, const torch::Tensor& key,
                     const torch::Tensor& value, const AttentionCall& call);

/// The cache's memory, empty. Throws std::invalid_argument for lengths that cannot be.
KeyValueCache new_cache(int64_t num_layers, torch::IntArrayRef shape,
                        const torch::TensorOptions& options);

/// input.position_ids, or 0 … seq - 1 behind what the cache holds: [batch, seq].
torch::Tensor positions_of(const TokenInput& input, const KeyValueCache* cache);

/// Throws std::invalid_argument where the cache cannot take `input`, or `input` is malformed.
void check_input(const TokenInput& input, const KeyValueCache* cache, int64_t max_positions);

/// What hidden_states() is called for: with gradients, shapes come again.
bool shapes_recur(const KeyValueCache* cache);

/// Whether layer `index` is recomputed in the backward.
bool is_checkpointed(const CausalLmOptions& options, int64_t index);

}  // namespace models::detail
