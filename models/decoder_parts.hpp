// SPDX-License-Identifier: Apache-2.0
// Parts that the decoders share; not installed.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ddp/core/error.hpp"
#include "ddp/detail/model_weights.hpp"
#include "ddp/ops/language.hpp"
#include "models/causal_lm.hpp"

namespace models::detail {

/// A module that only gives its children a common name.
class Group : public torch::nn::Module {
 public:
  using torch::nn::Module::register_module;
  using torch::nn::Module::register_parameter;
};

/// Creates the trainable parameter `name` with uninitialised memory.
torch::Tensor new_parameter(torch::nn::Module& owner, const std::string& name,
                            torch::IntArrayRef shape, const torch::TensorOptions& options);

template <typename... Args>
[[noreturn]] void refuse(const Args&... message) {
  throw std::invalid_argument(ddp::concat(message...));
}

/// Refuses sizes of `model` that are not positive.
void check_sizes(const char* model, std::initializer_list<std::pair<const char*, int64_t>> sizes);

/// The part of flops_per_token() that grows with the sequence; `width` is of all query heads.
double attention_flops_per_token(int64_t seq_len, int64_t width, int64_t num_layers);

/// State that all layers of one forward share; copies share the tensors.
struct LayerCall {
  TokenInput input;
  KeyValueCache* cache = nullptr;
  ddp::ops::AttentionOptions attention{};
  bool skips_result = false;  ///< nobody reads the layer's result, only its gradients are wanted
};
LayerCall layer_call(const TokenInput& input, KeyValueCache* cache,
                     const LanguageModelOptions& options);

/// Attention over a batch [batch, seq, heads, head_dim], packed or not, with or without a cache.
/// Returns [batch, seq, heads * head_dim]. `layer` indexes the cache.
torch::Tensor attend(const torch::Tensor& query, const torch::Tensor& key,
                     const torch::Tensor& value, const LayerCall& call, std::size_t layer,
                     double dropout_p = 0);

/// Allocates an empty cache. Throws std::invalid_argument for invalid lengths.
KeyValueCache new_cache(int64_t num_layers, torch::IntArrayRef shape,
                        const torch::TensorOptions& options);

/// Returns input.position_ids, or 0 … seq - 1 counted from the cache's length: [batch, seq].
torch::Tensor positions_of(const TokenInput& input, const KeyValueCache* cache);

/// Throws std::invalid_argument if `input` is malformed or does not fit the cache.
void check_input(const TokenInput& input, const KeyValueCache* cache, int64_t max_positions);

/// True if layer `index` is recomputed in the backward.
bool is_checkpointed(const LanguageModelOptions& options, std::size_t index);

/// Runs `layers` in order, recomputing the checkpointed ones in the backward, then grows the cache.
/// `call` is a LayerCall or derives from one. Each layer's forward takes `hidden` and `call`.
template <typename Layer, typename Call>
torch::Tensor run_layers(const std::vector<std::shared_ptr<Layer>>& layers, torch::Tensor hidden,
                         const Call& call, const LanguageModelOptions& options) {
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (call.cache != nullptr || !is_checkpointed(options, i)) {
      hidden = layers[i]->forward(hidden, call);
      continue;
    }
    if (!hidden.requires_grad()) {
      hidden.requires_grad_(true);  // a frozen embedding: gradients begin in this layer
    }
    hidden = ddp::ops::checkpoint(
        [layer = layers[i], call](const std::vector<torch::Tensor>& inputs) {
          auto this_call = call;
          this_call.skips_result = ddp::ops::is_recomputing();
          return layer->forward(inputs[0], this_call);
        },
        {hidden});
  }
  if (call.cache != nullptr) {
    call.cache->length += call.input.input_ids.size(1);
  }
  return hidden;
}

}  // namespace models::detail
