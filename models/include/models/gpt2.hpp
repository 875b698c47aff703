// SPDX-License-Identifier: Apache-2.0
// GPT-2 (Radford et al., 2019) as Hugging Face's GPT2LMHeadModel defines it: learned positions,
// pre-norm blocks, tanh-GELU, the head tied to the embedding. Parameter names and shapes are
// Hugging Face's (the four linear layers of a block hold their weights as [in, out]).
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "models/causal_lm.hpp"

namespace models {

/// The defaults are GPT-2 small's (124M).
struct Gpt2Options {
  int64_t vocab_size = 50257;       ///< rows of the embedding
  int64_t max_positions = 1024;     ///< longest sequence
  int64_t hidden_size = 768;        ///< width; a multiple of num_heads
  int64_t num_layers = 12;          ///< blocks
  int64_t num_heads = 12;           ///< of the attention
  int64_t intermediate_size = 0;    ///< 0: 4 * hidden_size
  double dropout = 0.1;             ///< for embeddings, residual branches and attention weights
  double layer_norm_eps = 1e-5;     ///< added to the variance
  double initializer_range = 0.02;  ///< standard deviation of initial weights
};

namespace detail {
class Gpt2Block;
}

class Gpt2Impl : public CausalLm {
 public:
  /// Creates uninitialised parameters with `tensor_options` (device, dtype). Throws
  /// std::invalid_argument if the sizes do not fit together.
  explicit Gpt2Impl(const Gpt2Options& options = {},
                    const torch::TensorOptions& tensor_options = {});
  ~Gpt2Impl() override;

  /// Hugging Face's initialisation: normal(0, initializer_range), the projections back into the
  /// residual stream divided by sqrt(2 * num_layers), biases 0, norms 1.
  void reset_parameters();

  torch::Tensor hidden_states(const TokenInput& input, KeyValueCache* cache = nullptr) override;
  const torch::Tensor& head_weight() const override { return wte_; }
  int64_t num_layers() const override { return options_.num_layers; }          ///< of options()
  int64_t max_positions() const override { return options_.max_positions; }    ///< of options()
  KeyValueCache make_cache(int64_t batch, int64_t max_length) const override;  ///< empty
  double flops_per_token(int64_t seq_len) const override;
  const Gpt2Options& options() const { return options_; }  ///< as given to the constructor

 private:
  bool is_matrix_product(const std::string& name) const override;

  Gpt2Options options_;
  std::vector<std::shared_ptr<detail::Gpt2Block>> blocks_;
  torch::Tensor wte_;  // transformer.wte.weight [vocab, hidden]
  torch::Tensor wpe_;  // transformer.wpe.weight [positions, hidden]
  torch::Tensor ln_f_weight_;
  torch::Tensor ln_f_bias_;
};
TORCH_MODULE(Gpt2);

}  // namespace models
