// SPDX-License-Identifier: Apache-2.0
// BERT (Devlin et al., arXiv:1810.04805) with its masked-language head, as Hugging Face's
// BertForMaskedLM defines it: learned positions and token types, post-norm blocks, exact GELU, the
// decoder tied to the embedding. Parameter names and shapes are Hugging Face's.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "models/language_model.hpp"

namespace models {

/// The defaults are BERT-base uncased's (110M).
struct BertOptions {
  int64_t vocab_size = 30522;       ///< rows of the embedding
  int64_t max_positions = 512;      ///< longest sequence
  int64_t num_token_types = 2;      ///< rows of the token-type embedding
  int64_t hidden_size = 768;        ///< width; a multiple of num_heads
  int64_t num_layers = 12;          ///< encoder blocks
  int64_t num_heads = 12;           ///< of the attention
  int64_t intermediate_size = 0;    ///< 0: 4 * hidden_size
  double hidden_dropout = 0.1;      ///< for embeddings and residual branches
  double attention_dropout = 0.1;   ///< for attention weights
  double layer_norm_eps = 1e-12;    ///< added to the variance
  double initializer_range = 0.02;  ///< standard deviation of initial weights
  /// Starts with a zero embedding, which gets a gradient from the decoder alone. -1: none.
  int64_t pad_token_id = 0;
};

namespace detail {
class BertLayer;
struct BertHead;
}  // namespace detail

class BertImpl : public LanguageModel {
 public:
  /// Creates uninitialised parameters with `tensor_options` (device, dtype). Throws
  /// std::invalid_argument if the sizes do not fit together.
  explicit BertImpl(const BertOptions& options = {},
                    const torch::TensorOptions& tensor_options = {});
  ~BertImpl() override;

  /// Hugging Face's initialisation: normal(0, initializer_range), biases 0, norms 1, the padding
  /// token's embedding 0.
  void reset_parameters();

  /// Returns the encoder's output [batch, seq, hidden]. Every token reads its whole row, or its
  /// whole document if `input` is packed. Rows that are not packed must hold no padding.
  torch::Tensor hidden_states(const TokenInput& input);
  /// Maps the encoder's output [..., hidden] to logits [..., vocab], in hidden's dtype.
  torch::Tensor logits(const torch::Tensor& hidden) const;
  /// The head runs on input.target_positions if defined, else on all tokens.
  LmOutput forward(const TokenInput& input, const torch::Tensor& labels) override;

  const torch::Tensor& head_weight() const override { return word_embeddings_; }
  void arrange_weights() override;
  int64_t num_layers() const override { return options_.num_layers; }        ///< of options()
  int64_t max_positions() const override { return options_.max_positions; }  ///< of options()
  /// Attention is not causal and counts whole. The head counts for computation().head_share of the
  /// tokens.
  double flops_per_token(int64_t seq_len) const override;
  const BertOptions& options() const { return options_; }  ///< as given to the constructor

 private:
  bool is_matrix_product(const std::string& name) const override;
  torch::Tensor embed(const TokenInput& input) const;

  BertOptions options_;
  torch::Tensor word_embeddings_;        // [vocab, hidden]
  torch::Tensor position_embeddings_;    // [positions, hidden]
  torch::Tensor token_type_embeddings_;  // [types, hidden]
  torch::Tensor norm_weight_;
  torch::Tensor norm_bias_;
  std::vector<std::shared_ptr<detail::BertLayer>> layers_;
  std::unique_ptr<detail::BertHead> head_;
};
TORCH_MODULE(Bert);

}  // namespace models
