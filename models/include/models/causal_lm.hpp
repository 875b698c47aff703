// SPDX-License-Identifier: Apache-2.0
// Interface of the autoregressive language models: hidden states, logits, the loss of a batch, and
// decoding with a cache of keys and values.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ddp/core/visit_tensors.hpp"
#include "ddp/ops/language.hpp"

namespace models {

/// A batch of token ids. Either each row is one document from its start, optionally followed by
/// padding whose outputs are unused. Or rows are packed, and `document_offsets` gives the document
/// starts.
struct TokenInput {
  torch::Tensor input_ids;           ///< int64 [batch, seq]
  torch::Tensor position_ids{};      ///< int64 [batch, seq]; undefined: 0 … seq - 1 in every row
  torch::Tensor document_offsets{};  ///< packed: int32 [documents + 1] over the batch * seq tokens
  int64_t max_document_length = 0;   ///< packed: length of the longest document
  /// bool [batch, tokens in the cache after the step], with single new tokens: true if the row
  /// reads it
  torch::Tensor key_mask{};
};

struct LmOutput {
  torch::Tensor loss_sum;     ///< float32, 0-dim: sum over the counted labels
  torch::Tensor num_correct;  ///< int64, 0-dim: counted labels that have the largest logit
};
inline void for_each_tensor(LmOutput& output, const ddp::TensorVisitor& visit) {
  visit(output.loss_sum);
}

/// Settings that change how results are computed, but neither the weights nor the results' meaning.
struct CausalLmOptions {
  ddp::ops::AttentionBackend attention = ddp::ops::AttentionBackend::Auto;
  int64_t loss_chunk_tokens = 0;  ///< tokens per chunk of logits; 0: the whole batch at once
  int64_t checkpoint_every = 0;   ///< recompute every k-th layer in the backward; 0: none, 1: all
};

/// Keys and values of the tokens so far, one pair per layer: [batch, kv_heads, max_length,
/// head_dim].
struct KeyValueCache {
  std::vector<torch::Tensor> keys;
  std::vector<torch::Tensor> values;
  int64_t length = 0;      ///< tokens held
  int64_t max_length = 0;  ///< tokens that fit
};

class CausalLm : public torch::nn::Module {
 public:
  /// Returns the head's input: [batch, seq, dim]. With a cache, `input` continues the cached tokens
  /// (one token, or any number into an empty cache), is appended to the cache, and gets no
  /// gradient.
  virtual torch::Tensor hidden_states(const TokenInput& input, KeyValueCache* cache = nullptr) = 0;

  /// [vocab, dim]; tied models return their embedding.
  virtual const torch::Tensor& head_weight() const = 0;
  virtual int64_t num_layers() const = 0;
  virtual int64_t max_positions() const = 0;
  virtual KeyValueCache make_cache(int64_t batch, int64_t max_length) const = 0;
  /// FLOPs of forward and backward per token: two per multiply-add, causal attention counted half,
  /// nothing recomputed. That is 6 per trained matrix parameter and 4 per frozen one (no weight
  /// gradient).
  virtual double flops_per_token(int64_t seq_len) const = 0;

  int64_t vocab_size() const { return head_weight().size(0); }
  /// Maps hidden [..., dim] to logits [..., vocab], in hidden's dtype.
  torch::Tensor logits(const torch::Tensor& hidden) const;

  /// `labels` is int64 [batch, seq], already shifted: labels[t] is the token after input_ids[t].
  /// Labels equal to ops::kIgnoreIndex do not count.
  LmOutput forward(const TokenInput& input, const torch::Tensor& labels);

  CausalLmOptions& computation() { return computation_; }
  const CausalLmOptions& computation() const { return computation_; }

 protected:
  /// The part of flops_per_token() that grows with the parameters.
  double matrix_flops_per_token() const;
  /// True if a token is multiplied by the parameter `name`, false for a lookup table.
  virtual bool is_matrix_product(const std::string& name) const = 0;

  CausalLmOptions computation_;
};

/// Continues one prompt greedily (batch 1) by up to `max_new_tokens` tokens. Returns the new
/// tokens, including the one of `end_tokens` that ended the answer. Runs the model in evaluation
/// mode.
std::vector<int64_t> generate_greedy(CausalLm& model, const std::vector<int64_t>& prompt,
                                     int64_t max_new_tokens,
                                     const std::vector<int64_t>& end_tokens);

/// Continues several prompts at once and returns the answers in their order. Every step covers all
/// prompts, and the longest answer sets the number of steps. If a prompt with max_new_tokens would
/// not fit behind the longest one, the prompts run one by one. Batched sums may decide near ties of
/// bfloat16 logits differently.
std::vector<std::vector<int64_t>> generate_greedy(CausalLm& model,
                                                  const std::vector<std::vector<int64_t>>& prompts,
                                                  int64_t max_new_tokens,
                                                  const std::vector<int64_t>& end_tokens);

/// Draws from softmax(logits / temperature) of the `top_k` largest (0: all) instead. The call has
/// its own generator, seeded with `seed`.
struct SamplingOptions {
  double temperature = 1;
  int64_t top_k = 0;
  uint64_t seed = 0;
};
std::vector<int64_t> generate_sampled(CausalLm& model, const std::vector<int64_t>& prompt,
                                      int64_t max_new_tokens,
                                      const std::vector<int64_t>& end_tokens,
                                      const SamplingOptions& options);

}  // namespace models
