// SPDX-License-Identifier: Apache-2.0
// Interface of the language models as training sees them: a batch of tokens in, its loss out.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <string>

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
  torch::Tensor token_type_ids{};  ///< BERT: int64 [batch, seq]; undefined: type 0 everywhere
  /// Masked models: int64 [count], the tokens of the flattened batch that the head sees. The labels
  /// are then int64 [count] too. Undefined: all tokens.
  torch::Tensor target_positions{};
};

/// The loss of one batch and its hits.
struct LmOutput {
  torch::Tensor loss_sum;     ///< float32, 0-dim: sum over the counted labels
  torch::Tensor num_correct;  ///< int64, 0-dim: counted labels that have the largest logit
};
inline void for_each_tensor(LmOutput& output, const ddp::TensorVisitor& visit) {
  visit(output.loss_sum);
}

/// How results are computed. Label smoothing and z loss change the results of training, and
/// num_tokens those of generation.
struct LanguageModelOptions {
  ddp::ops::AttentionBackend attention = ddp::ops::AttentionBackend::Auto;  ///< of all layers
  int64_t loss_chunk_tokens = 0;  ///< tokens per chunk of logits; 0: the whole batch at once
  int64_t checkpoint_every = 0;   ///< recompute every k-th layer in the backward; 0: none, 1: all
  double head_share = 1;          ///< share of tokens that the head sees, for flops_per_token()
  double label_smoothing = 0;     ///< of the loss in training mode: see ops::linear_cross_entropy
  double z_loss = 0;              ///< likewise
  /// Ids of the vocabulary, if the head has more rows: generation never chooses the rest. 0: all.
  int64_t num_tokens = 0;
};

class LanguageModel : public torch::nn::Module {
 public:
  /// As torch::nn::Module's, and then arrange_weights().
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;    ///< likewise
  void to(torch::Device device, bool non_blocking = false) override;  ///< likewise
  void load(torch::serialize::InputArchive& archive) override;        ///< likewise
  /// Moves weights to where products read them fastest: those of one product into one memory, the
  /// head into memory with padding. Names, values and gradients stay. The constructor, to() and
  /// load() do it; a forward never moves weights. Call it if weights got memory in another way, by
  /// set_data() for instance: results are right without it, but slower.
  virtual void arrange_weights();

  /// [vocab, dim]; tied models return their embedding.
  virtual const torch::Tensor& head_weight() const = 0;
  virtual int64_t num_layers() const = 0;     ///< blocks
  virtual int64_t max_positions() const = 0;  ///< longest sequence
  /// FLOPs of forward and backward per token: two per multiply-add, causal attention counted half,
  /// nothing recomputed. That is 6 per trained matrix parameter and 4 per frozen one (no weight
  /// gradient).
  virtual double flops_per_token(int64_t seq_len) const = 0;

  int64_t vocab_size() const { return head_weight().size(0); }  ///< rows of the head

  /// `labels` is int64 [batch, seq]; labels[t] is the token that position t predicts. Causal models
  /// get them already shifted: the token after input_ids[t]. Labels equal to ops::kIgnoreIndex do
  /// not count.
  virtual LmOutput forward(const TokenInput& input, const torch::Tensor& labels) = 0;

  LanguageModelOptions& computation() { return computation_; }  ///< may change between steps
  const LanguageModelOptions& computation() const { return computation_; }  ///< the same

 protected:
  /// The part of flops_per_token() that grows with the parameters.
  double matrix_flops_per_token() const;
  /// The loss's options in the current mode (training or evaluation).
  ddp::ops::LinearCrossEntropyOptions loss_options(const torch::Tensor& bias = {}) const;
  /// True if a token is multiplied by the parameter `name`, false for a lookup table.
  virtual bool is_matrix_product(const std::string& name) const = 0;

  LanguageModelOptions computation_;  ///< see computation()
};

}  // namespace models
