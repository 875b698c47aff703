// SPDX-License-Identifier: Apache-2.0
#include "decoder_parts.hpp"

#include <torch/torch.h>

#include <limits>

namespace models::detail {
namespace {

/// Appends the new keys (or values) [batch, seq, kv_heads, head_dim] to the cached ones and returns
/// all of them, [batch, kv_heads, length, head_dim].
torch::Tensor append(torch::Tensor& cached, const torch::Tensor& fresh, int64_t length) {
  const int64_t seq = fresh.size(1);
  cached.narrow(2, length, seq).copy_(fresh.transpose(1, 2));
  return cached.narrow(2, 0, length + seq).to(fresh.scalar_type());  // autocast has its own dtype
}

}  // namespace

torch::Tensor new_parameter(torch::nn::Module& owner, const std::string& name,
                            torch::IntArrayRef shape, const torch::TensorOptions& options) {
  return owner.register_parameter(name, torch::empty(shape, options.requires_grad(false)));
}

void check_sizes(const char* model, std::initializer_list<std::pair<const char*, int64_t>> sizes) {
  for (const auto& [name, value] : sizes) {
    if (value <= 0) {
      refuse(model, ": ", name, " = ", value, ": it must be at least 1");
    }
  }
}

double attention_flops_per_token(int64_t seq_len, int64_t width, int64_t num_layers) {
  // Q Kᵀ and P V: 2 * 2 * seq * width, halved by causality, tripled by the backward.
  return 6 * static_cast<double>(seq_len) * static_cast<double>(width) *
         static_cast<double>(num_layers);
}

LayerCall layer_call(const TokenInput& input, KeyValueCache* cache,
                     const LanguageModelOptions& options) {
  // Gradients without a cache mean training, where shapes repeat.
  LayerCall call{.input = input,
                 .cache = cache,
                 .attention = {.backend = options.attention,
                               .shapes_recur = cache == nullptr && torch::GradMode::is_enabled()}};
  if (input.key_mask.defined()) {
    call.attention.mask =
        torch::zeros(input.key_mask.sizes(), input.key_mask.options().dtype(torch::kFloat))
            .masked_fill_(input.key_mask.logical_not(), -std::numeric_limits<float>::infinity())
            .unsqueeze(1)
            .unsqueeze(1);
  }
  return call;
}

torch::Tensor attend(const torch::Tensor& query, const torch::Tensor& key,
                     const torch::Tensor& value, const LayerCall& call, std::size_t layer,
                     double dropout_p) {
  auto options = call.attention;
  options.dropout_p = dropout_p;
  const int64_t batch = query.size(0), seq = query.size(1);
  const int64_t width = query.size(2) * query.size(3);
  if (call.input.document_offsets.defined()) {
    const auto flat = [](const torch::Tensor& tensor) { return tensor.flatten(0, 1); };
    return ddp::ops::packed_attention(flat(query), flat(key), flat(value),
                                      call.input.document_offsets, call.input.max_document_length,
                                      options)
        .view({batch, seq, width});
  }
  auto keys = key.transpose(1, 2), values = value.transpose(1, 2);
  if (call.cache != nullptr) {
    keys = append(call.cache->keys[layer], key, call.cache->length);
    values = append(call.cache->values[layer], value, call.cache->length);
    options.is_causal = seq > 1;  // a single new token reads all tokens that key_mask allows
  }
  return ddp::ops::attention(query.transpose(1, 2), keys, values, options)
      .transpose(1, 2)
      .reshape({batch, seq, width});
}

KeyValueCache new_cache(int64_t num_layers, torch::IntArrayRef shape,
                        const torch::TensorOptions& options) {
  KeyValueCache cache;
  cache.max_length = shape[2];
  for (int64_t i = 0; i < num_layers; ++i) {
    cache.keys.push_back(torch::empty(shape, options.requires_grad(false)));
    cache.values.push_back(torch::empty(shape, options.requires_grad(false)));
  }
  return cache;
}

torch::Tensor positions_of(const TokenInput& input, const KeyValueCache* cache) {
  if (input.position_ids.defined()) {
    return input.position_ids;
  }
  const int64_t first = cache == nullptr ? 0 : cache->length;
  return torch::arange(first, first + input.input_ids.size(1), input.input_ids.options())
      .unsqueeze(0)
      .expand_as(input.input_ids);
}

void check_input(const TokenInput& input, const KeyValueCache* cache, int64_t max_positions) {
  if (input.input_ids.dim() != 2 || input.input_ids.scalar_type() != torch::kLong) {
    refuse("input_ids must be int64 [batch, seq], not ", input.input_ids.scalar_type(), " ",
           input.input_ids.sizes());
  }
  const int64_t seq = input.input_ids.size(1);
  const int64_t held = cache == nullptr ? 0 : cache->length;
  const int64_t longest = input.document_offsets.defined() ? input.max_document_length : held + seq;
  if (longest > max_positions) {
    refuse("a sequence of ", longest, " tokens is longer than the model's ", max_positions,
           " positions");
  }
  if (input.key_mask.defined() &&
      (cache == nullptr || seq != 1 ||
       input.key_mask.sizes() != torch::IntArrayRef({input.input_ids.size(0), held + 1}))) {
    refuse("key_mask must be [batch, ", held + 1,
           "] and needs a cache and single new tokens; it is ", input.key_mask.sizes(), " with ",
           seq, " tokens");
  }
  if (cache == nullptr) {
    return;
  }
  if (held + seq > cache->max_length) {
    refuse("the cache holds ", held, " of ", cache->max_length, " tokens: ", seq,
           " more do not fit");
  }
  if (held > 0 && seq > 1) {
    refuse("a non-empty cache is extended by one token at a time, not ", seq);
  }
  if (input.document_offsets.defined()) {
    refuse("packed documents cannot continue a cache");
  }
}

bool is_checkpointed(const LanguageModelOptions& options, std::size_t index) {
  return options.checkpoint_every > 0 &&
         static_cast<int64_t>(index) % options.checkpoint_every == 0 &&
         torch::GradMode::is_enabled();
}

}  // namespace models::detail
