// SPDX-License-Identifier: Apache-2.0
// Interface of the autoregressive language models: hidden states, logits, and decoding with a cache
// of keys and values.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "models/language_model.hpp"

namespace models {

/// Keys and values of the tokens so far, one pair per layer: [batch, kv_heads, max_length,
/// head_dim].
struct KeyValueCache {
  std::vector<torch::Tensor> keys;    ///< by layer
  std::vector<torch::Tensor> values;  ///< by layer
  int64_t length = 0;                 ///< tokens held
  int64_t max_length = 0;             ///< tokens that fit
};

class CausalLm : public LanguageModel {
 public:
  /// Returns the head's input: [batch, seq, dim]. With a cache, `input` continues the cached tokens
  /// (one token, or any number into an empty cache), is appended to the cache, and gets no
  /// gradient.
  virtual torch::Tensor hidden_states(const TokenInput& input, KeyValueCache* cache = nullptr) = 0;
  /// An empty cache in the model's dtype, on its device.
  virtual KeyValueCache make_cache(int64_t batch, int64_t max_length) const = 0;

  /// Maps hidden [..., dim] to logits [..., vocab], in hidden's dtype.
  torch::Tensor logits(const torch::Tensor& hidden) const;
  LmOutput forward(const TokenInput& input, const torch::Tensor& labels) override;
};

/// Asked after each token; true ends the generation early.
using StopCheck = std::function<bool()>;

/// Continues one prompt greedily (batch 1) by up to `max_new_tokens` tokens, at most to the model's
/// last position. Returns the new tokens, including the one of `end_tokens` that ended the answer.
/// Ids from LanguageModelOptions::num_tokens on are never chosen. Runs the model in evaluation
/// mode; afterwards each submodule has its own mode again. Throws std::invalid_argument for a
/// prompt that is empty or fills all positions.
std::vector<int64_t> generate_greedy(CausalLm& model, const std::vector<int64_t>& prompt,
                                     int64_t max_new_tokens, const std::vector<int64_t>& end_tokens,
                                     const StopCheck& stops = {});

/// Continues several prompts at once and returns the answers in their order. Every step covers all
/// prompts, and the longest answer sets the number of steps. If a prompt with max_new_tokens would
/// not fit behind the longest one, the prompts run one by one. Batched sums may decide near ties of
/// bfloat16 logits differently.
std::vector<std::vector<int64_t>> generate_greedy(CausalLm& model,
                                                  const std::vector<std::vector<int64_t>>& prompts,
                                                  int64_t max_new_tokens,
                                                  const std::vector<int64_t>& end_tokens,
                                                  const StopCheck& stops = {});

/// Draws from softmax(logits / temperature) of the `top_k` largest (0: all) instead. The call has
/// its own generator, seeded with `seed`.
struct SamplingOptions {
  double temperature = 1;  ///< below 1, likely tokens become likelier; 0: takes the likeliest
  int64_t top_k = 0;       ///< draws from this many tokens; 0: from all
  uint64_t seed = 0;       ///< equal seeds give equal texts
  std::function<void(int64_t token)> on_token{};  ///< called with each new token
};
/// Continues one prompt as generate_greedy(), with draws.
std::vector<int64_t> generate_sampled(CausalLm& model, const std::vector<int64_t>& prompt,
                                      int64_t max_new_tokens,
                                      const std::vector<int64_t>& end_tokens,
                                      const SamplingOptions& options, const StopCheck& stops = {});

}  // namespace models
