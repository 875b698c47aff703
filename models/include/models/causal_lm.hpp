// SPDX-License-Identifier: Apache-2.0
// What every autoregressive language model here can do: hidden states, logits, the loss of a batch,
// and decoding with a cache of keys and values.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ddp/core/visit_tensors.hpp"
#include "ddp/ops/attention.hpp"

namespace models {

/// A batch of token ids. Either each row is one document from its start, with what follows its end
/// (padding) never asked for; or rows are packed, and `document_offsets` says where documents
/// begin.
struct TokenInput {
  torch::Tensor input_ids;           ///< int64 [batch, seq]
  torch::Tensor position_ids{};      ///< int64 [batch, seq]; undefined: 0 … seq - 1 in every row
  torch::Tensor document_offsets{};  ///< packed: int32 [documents + 1] over the batch * seq tokens
  int64_t max_document_length = 0;   ///< packed: of the longest document
  /// bool [batch, tokens the cache then holds], with single new tokens: which of them a row reads
  torch::Tensor key_mask{};
};

struct LmOutput {
  torch::Tensor loss_sum;     ///< float32, 0-dim: sum over the labels that count
  torch::Tensor num_correct;  ///< int64, 0-dim: of them, how many have the largest logit
};
inline void for_each_tensor(LmOutput& output, const ddp::TensorVisitor& visit) {
  visit(output.loss_sum);
}

/// Settings of the computation that change no weight and no meaning.
struct CausalLmOptions {
  ddp::ops::AttentionBackend attention = ddp::ops::AttentionBackend::Auto;
  int64_t loss_chunk_tokens = 0;  ///< tokens whose logits exist at a time; 0: all of a batch
  int64_t checkpoint_every = 0;   ///< recompute every k-th layer in the backward; 0: none, 1: all
};

/// Keys and values of the tokens so far, one pair a layer: [batch, kv_heads, max_length, head_dim].
struct KeyValueCache {
  std::vector<torch::Tensor> keys;
  std::vector<torch::Tensor> values;
  int64_t length = 0;      ///< tokens held
  int64_t max_length = 0;  ///< tokens that fit
};

class CausalLm : public torch::nn::Module {
 public:
  /// What the head reads: [batch, seq, dim]. With a cache, `input` continues what the cache holds
  /// (one token, or any number into an empty cache) and is added to it; no gradient then.
  virtual torch::Tensor hidden_states(const TokenInput& input, KeyValueCache* cache = nullptr) = 0;

  /// [vocab, dim]; tied models give their embedding.
  virtual const torch::Tensor& head_weight() const = 0;
  virtual int64_t num_layers() const = 0;
  virtual int64_t max_positions() const = 0;
  virtual KeyValueCache make_cache(int64_t batch, int64_t max_length) const = 0;
  /// Multiply-adds, times two, of forward and backward a token, causal attention counted half and
  /// nothing recomputed: 6 a trained parameter of a matrix, 4 a frozen one (no weight gradient).
  virtual double flops_per_token(int64_t seq_len) const = 0;

  int64_t vocab_size() const { return head_weight().size(0); }
  /// hidden [..., dim] -> [..., vocab], in hidden's dtype.
  torch::Tensor logits(const torch::Tensor& hidden) const;

  /// `labels` int64 [batch, seq] are the tokens that follow, already shifted: labels[t] is what
  /// input_ids[t] should be followed by; ops::kIgnoreIndex where it does not count.
  LmOutput forward(const TokenInput& input, const torch::Tensor& labels);

  CausalLmOptions& computation() { return computation_; }
  const CausalLmOptions& computation() const { return computation_; }

 protected:
  /// The share of flops_per_token() that grows with the parameters.
  double matrix_flops_per_token() const;
  /// Whether a token is multiplied with the matrix of that name (not so for a table that is read).
  virtual bool is_matrix_product(const std::string& name) const = 0;

  CausalLmOptions computation_;
};

/// Greedy continuation of one prompt, batch 1: the tokens after it, up to `max_new_tokens`, the one
/// of `end_tokens` that ended it included. The model is in evaluation mode meanwhile.
std::vector<int64_t> generate_greedy(CausalLm& model, const std::vector<int64_t>& prompt,
                                     int64_t max_new_tokens,
                                     const std::vector<int64_t>& end_tokens);

/// The same for several prompts at once, in their order: as many steps as the longest answer takes,
/// each for all. Where a prompt with max_new_tokens would not fit behind the longest one, they are
/// taken one by one. Sums are those of a batch: near ties of bfloat16 logits may fall another way.
std::vector<std::vector<int64_t>> generate_greedy(CausalLm& model,
                                                  const std::vector<std::vector<int64_t>>& prompts,
                                                  int64_t max_new_tokens,
                                                  const std::vector<int64_t>& end_tokens);

/// The same by drawing from softmax(logits / temperature) of the `top_k` largest (0: all), from a
/// generator of its own with `seed`.
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
