// SPDX-License-Identifier: Apache-2.0
// A transformer encoder over tokens: the reference model of cluster_check. Pre-norm blocks without
// a mask, exact GELU, learned positions, and a head that is not tied to the embedding.
// benchmarks/pytorch_encoder.py is the same model in PyTorch.
#pragma once

#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "models/language_model.hpp"

namespace models {

/// Sizes; the defaults are those of cluster_check.
struct EncoderOptions {
  int64_t vocab_size = 50257;     ///< rows of the embedding and of the head
  int64_t max_positions = 512;    ///< longest sequence
  int64_t hidden_size = 768;      ///< width
  int64_t num_layers = 12;        ///< blocks
  int64_t num_heads = 12;         ///< a divisor of hidden_size
  int64_t intermediate_size = 0;  ///< 0: 4 * hidden_size
  double layer_norm_eps = 1e-5;   ///< added to the variance
};

namespace detail {
class EncoderBlock;
}

class EncoderImpl : public LanguageModel {
 public:
  /// Creates and initialises parameters with `tensor_options` (device, dtype). Throws
  /// std::invalid_argument if the sizes do not fit together.
  explicit EncoderImpl(const EncoderOptions& options = {},
                       const torch::TensorOptions& tensor_options = {});
  ~EncoderImpl() override;

  /// Blocks as in a ViT; embeddings and head normal(0, 0.02).
  void reset_parameters();

  /// The loss covers all positions. Takes no packed rows, key_mask, token types or target
  /// positions.
  LmOutput forward(const TokenInput& input, const torch::Tensor& labels) override;
  const torch::Tensor& head_weight() const override { return head_; }
  int64_t num_layers() const override { return options_.num_layers; }
  int64_t max_positions() const override { return options_.max_positions; }
  double flops_per_token(int64_t seq_len) const override;
  const EncoderOptions& options() const { return options_; }  ///< as given to the constructor

 private:
  bool is_matrix_product(const std::string& name) const override;

  EncoderOptions options_;
  torch::Tensor words_;      // words.weight [vocab, hidden]
  torch::Tensor positions_;  // positions.weight [max_positions, hidden]
  std::vector<std::shared_ptr<detail::EncoderBlock>> blocks_;
  torch::Tensor norm_weight_;  // norm
  torch::Tensor norm_bias_;
  torch::Tensor head_;  // head.weight [vocab, hidden]
};
TORCH_MODULE(Encoder);

}  // namespace models
